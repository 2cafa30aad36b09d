"""Blocks whose branches are added send one sum for all of them, and equal one device."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

from .case import CLASSES, Case, Data, labels, weights
from .harness import compare
from .matrix import level_config, spread
from .optimizer_zoo import OPTIMIZERS

LENGTH, WIDTH = 4, 8


def _side_by_side(x: Any, name: str) -> Any:
    """Attention and a gated unit of the same input, as in GPT-NeoX and PaLM, with biases."""
    h = layers.LayerNormalization(name=f"{name}_norm")(x)
    attended = layers.MultiHeadAttention(4, 2, name=f"{name}_attention")(h, h)
    up = layers.Dense(16, activation="tanh", name=f"{name}_up")(h)
    gate = layers.Dense(16, activation="sigmoid", name=f"{name}_gate")(h)
    down = layers.Dense(WIDTH, name=f"{name}_down")(layers.Multiply()([up, gate]))
    return layers.Add(name=f"{name}_sum")([x, attended, down])


def _normed_after(x: Any, name: str) -> Any:
    """What query, key and value take has a residual connection, too, as in BERT."""
    h = layers.MultiHeadAttention(4, 2, name=f"{name}_attention")(x, x)
    return layers.LayerNormalization(name=f"{name}_norm")(layers.Add(name=f"{name}_sum")([x, h]))


def _build() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH), name="rows")
    x = layers.Dense(WIDTH, name="first")(inputs)
    for i in range(2):
        x = _normed_after(_side_by_side(x, f"beside_{i}"), f"after_{i}")
    x = layers.GlobalAveragePooling1D(name="means")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="branches")


def _data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, LENGTH, WIDTH))
    return x, labels(rng, samples), weights(rng, samples)


LAYOUTS = {
    r".*attention/(query|key|value)/kernel": (None, "model", None),
    r".*attention/(query|key|value)/bias": ("model", None),
    r".*attention/attention_output/kernel": ("model", None, None),
    r".*_(up|gate)/kernel": (None, "model"),
    r".*_(up|gate)/bias": ("model",),
    r".*_down/kernel": ("model", None),
}
CASE = Case(name="branches", build=_build, data=_data, layout_map=LAYOUTS)
STAGES = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
AGAIN = {"recompute": kdist.RecomputeConfig(layers=[".*attention", ".*_up"])}
ROWS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "model4": ({"model": 4}, {}),
    "data2 model2": ({"data": 2, "model": 2}, level_config("level3")),
    "sequence": ({"data": 2, "model": 2}, {"sequence_parallel": True}),
    "again": ({"data": 2, "model": 2}, {**AGAIN, **level_config("level2")}),
    "whole batch": ({"data": 2, "model": 2}, {"batch_semantics": "global"}),
    "pipe2 model2": ({"pipe": 2, "model": 2}, STAGES),
    "all": ({"pipe": 2, "data": 2, "model": 2}, {**STAGES, **AGAIN, **level_config("level3")}),
}


@pytest.mark.parametrize(
    "row", spread([(row,) for row in ROWS], [("data2 model2",), ("pipe2 model2",)], quick=0)
)
def test_branches_equal_one_device(row: str, engine: str) -> None:
    axes, options = ROWS[row]
    compare(CASE, axes, optimizer=OPTIMIZERS["sgd_momentum"], engine=engine, config=options)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("sequence", [False, True])
def test_one_sum_for_all_branches(sequence: bool, policy: str) -> None:
    """Backward too: of what the branches take, and of query, key and value. In any dtype."""
    keras.config.set_dtype_policy(policy)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=4), layout_map=LAYOUTS, sequence_parallel=sequence
    )
    model = kdist.parallelize(_build(), config)
    model.compile("sgd", "mse")
    found = kdist.inspect(model, 2)
    kind = "reduce-scatter" if sequence else "all-reduce"
    sums = [one for one in found.collectives if one.kind == kind]
    size = 2 * LENGTH * WIDTH * (4 if policy == "float32" else 2)
    told = [one for one in sums if one.bytes == size]
    assert [one.phase for one in told].count("forward") == 4, found
    assert [one.phase for one in told].count("backward") == 4, found
    layers = {frozenset(one.layer.split("+")) for one in told}
    assert {"beside_1_down", "beside_1_attention/attention_output"} in layers
    gathers = [one for one in found.collectives if one.kind == "all-gather"]
    assert len(gathers) == (9 if sequence else 0), found  # no gradient of a weight that is cut
    dtype = policy.removeprefix("mixed_")
    assert all(one.dtype == dtype for one in gathers), found
