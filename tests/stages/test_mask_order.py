"""Stages that would run a reader of a masked tensor on the wrong side of attention are refused."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.pipeline import Graph, GraphNode
from kdist.stages.mask_order import check_mask_order

import keras
import numpy as np
import pytest
from keras import layers


def node(name: str, *inputs: str) -> GraphNode:
    return GraphNode(name=name, inputs=inputs, outputs={f"{name}_out": 1.0})


GRAPH = Graph(
    nodes=(node("early", "x"), node("attention", "x"), node("late", "x"), node("other", "y")),
    inputs=("x", "y"),
)


@pytest.mark.parametrize(
    "stages",
    [
        [["early", "attention"], ["late", "other"]],
        [["early"], ["attention", "late", "other"]],
        [["other"], ["early", "attention", "late"]],
    ],
)
def test_the_model_s_order_is_fine(stages: Any) -> None:
    check_mask_order(GRAPH, stages, {"attention": {"x"}, "early": set()})


@pytest.mark.parametrize(
    ("stages", "reader"),
    [
        ([["early", "late"], ["attention", "other"]], "late"),
        ([["attention"], ["early", "late", "other"]], "early"),
    ],
)
def test_the_other_way_round_is_refused(stages: Any, reader: str) -> None:
    with pytest.raises(ValueError, match=f"Layer '{reader}' reads it .* Received: 'attention'"):
        check_mask_order(GRAPH, stages, {"attention": {"x"}})
    check_mask_order(GRAPH, stages, {"attention": set()})


def test_a_pipeline_refuses_it() -> None:
    x = inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(8, 4, mask_zero=True, name="table")(x)
    deep = layers.MultiHeadAttention(2, 2, name="attention")(x, x)
    for i in range(2):
        deep = layers.Dense(4, name=f"deep{i}")(deep)
    # Keras runs it after attention, since it is less deep.
    x = layers.Add(name="add")([layers.Dense(4, name="side")(x), deep])
    model = keras.Model(inputs, x)
    model = kdist.PipelineModel(model, 2, 2, assignment={"table": 0, "side": 0, "attention": 1})
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'attention' on stage 1, 'side' on stage 0"):
        model.train_on_batch(np.ones((4, 4), "int32"), np.ones((4, 4, 4)))
