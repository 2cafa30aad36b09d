"""Stages balanced by measured times: what is done with them, and one real measurement."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.pipeline import partition
from kdist.stages.measured_costs import LayerCosts, MeasuredCost, measure
from kdist.stages.model_graph import graph_of

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ..parity import assert_close, assert_same_weights

WIDTH = 16
TWO = {"pipe": 2}


@keras.saving.register_keras_serializable("test_measured_costs")
class Slow(layers.Layer):
    """Multiplies again and again, in a loop that no estimate looks into; keeps its input."""

    def call(self, x: Any) -> Any:
        def more(i: Any, m: Any) -> Any:
            return i + 1, tf.linalg.matmul(m, m) / 128.0

        once = tf.ones((128, 128), x.dtype) + 0.0 * tf.reduce_sum(x)
        _, product = tf.while_loop(lambda i, _: i < 60, more, (0, once))
        return x + 0.0 * tf.reduce_mean(product)


def model_of(*stack: layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((WIDTH,)), *stack], name="net")


def slow_first() -> keras.Model:
    dense = [layers.Dense(WIDTH, "tanh", name=f"dense{i}") for i in range(5)]
    return model_of(Slow(name="slow"), *dense)


def staged(model: keras.Model, **options: Any) -> keras.Model:
    pipeline = kdist.PipelineConfig(micro_batches=2, costs="measured")
    config = kdist.ParallelConfig(mesh=kdist.mesh(**TWO), pipeline=pipeline, **options)
    return kdist.parallelize(model, config)


# -- what is done with times ---------------------------------------------------------------------


def test_times_decide_the_cut_and_stand_beside_the_estimate() -> None:
    graph = graph_of(slow_first()).graph
    estimated = {node.name: node.cost for node in graph.nodes}
    names = list(estimated)
    slow, *dense = names
    measured = {slow: MeasuredCost(0.009, 0.021)}
    measured |= {name: MeasuredCost(0.001, 0.001) for name in dense}
    costs = LayerCosts(estimated, measured, rows=4)
    assert partition(costs.applied(graph), 2).stages == ((slow,), tuple(dense))
    assert partition(LayerCosts(estimated).applied(graph), 2).stages != ((slow,), tuple(dense))
    first, second = costs.of_stages(((slow,), tuple(dense)))
    assert first.startswith("9.00 ms forward, 21.00 ms backward: 75% measured, ")
    assert second.startswith("5.00 ms forward, 5.00 ms backward: 25% measured, ")
    share = estimated[slow] / sum(estimated.values())
    assert first.endswith(f"{share:.0%} estimated")
    assert LayerCosts(estimated).of_stages(((slow,), tuple(dense))) == ["", ""]


# -- one measurement -----------------------------------------------------------------------------


def test_what_is_measured() -> None:
    """Every call of the graph, alike ones once; state stays as it is."""
    x = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(10, WIDTH, name="embedding")(x)
    one = layers.Dense(WIDTH, name="one")(embedded)
    two = layers.Dense(WIDTH, name="two")(one)
    normal = layers.BatchNormalization(name="norm")(layers.Dropout(0.5, name="drop")(two))
    model = keras.Model(x, keras.ops.mean(normal, axis=1))
    before = [v.numpy() for v in model.variables]
    described = graph_of(model)
    costs = measure(described, model, keras.KerasTensor((8, 6), "int32"), 4, "/device:CPU:1")
    assert costs.measured is not None
    assert set(costs.measured) == set(described.graph.named)
    assert costs.measured["one"] is costs.measured["two"]
    assert all(c.forward > 0 and c.backward >= 0 for c in costs.measured.values())
    assert costs.rows == 4
    for old, variable in zip(before, model.variables):
        np.testing.assert_array_equal(old, variable.numpy())


@pytest.mark.usefixtures("float64")
def test_a_slow_layer_that_no_estimate_sees_moves_the_cut() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 8, WIDTH))
    by_estimate = slow_first()
    pipeline = kdist.PipelineConfig(micro_batches=2)
    kdist.parallelize(by_estimate, kdist.ParallelConfig(mesh=kdist.mesh(**TWO), pipeline=pipeline))
    plain, model = slow_first(), staged(slow_first())
    for each in (plain, model):
        each.compile("adam", "mse")
    losses = [[float(m.train_on_batch(x, y)) for _ in range(2)] for m in (plain, model)]
    assert_close(*losses)
    assert_same_weights(plain, model)
    cut, estimate = attached(model).staged, attached(by_estimate).staged
    assert cut is not None and estimate is not None
    assert cut.partition.stages[0] == ("slow",)
    assert len(estimate.partition.stages[0]) > 1
    (note,) = [note for note in model.plan().notes if "measured" in note]
    assert "stages by measured costs of 4 rows on one device" in note
    assert "stage 0: slow (" in note and "% measured, " in note and "% estimated" in note


def test_nothing_is_cut_before_a_batch() -> None:
    model = staged(slow_first())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="when the first batch shows the shapes.*costs='measured'"):
        model.plan()
    model.predict(np.zeros((8, WIDTH)), verbose=0)
    assert "measured" in str(model.plan().notes)


def test_a_layer_that_cannot_run_alone_is_named() -> None:
    class Picky(layers.Layer):
        def call(self, x: Any) -> Any:
            if x.shape[0] == 4:
                raise ValueError("not four rows")
            return x

    model = staged(model_of(layers.Dense(WIDTH, name="dense"), Picky(name="picky")))
    with pytest.raises(
        ValueError, match="(?s)Layer 'picky' cannot run alone.*Received.*not four rows"
    ):
        model.predict(np.zeros((8, WIDTH)), verbose=0)


def test_stages_that_are_given_are_not_measured() -> None:
    with pytest.raises(ValueError, match="for stages='auto'.*Received: costs='measured', stages="):
        kdist.PipelineConfig(micro_batches=2, stages={"a": 0}, costs="measured")
    with pytest.raises(ValueError, match="Received: costs='guess'"):
        kdist.PipelineConfig(micro_batches=2, costs="guess")  # type: ignore[arg-type]
    model = slow_first()
    kdist.set_stage(model.layers[0], 0)
    with pytest.raises(ValueError, match=r"kdist.set_stage has given stages.*stages of \['slow'\]"):
        staged(model).predict(np.zeros((8, WIDTH)), verbose=0)
