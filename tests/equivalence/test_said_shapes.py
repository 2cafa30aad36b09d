"""Sizes that depend on values, and that `set_shape` says in a trace: equal to one plain device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from .case import CLASSES, FEED_FORWARD, Case
from .harness import compare
from .matrix import MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_own_look_ups import OVER, on
from .zoo import labels


class FirstFour(keras.layers.Layer):
    """The first columns; how many, values say, and `set_shape` knows."""

    def call(self, x: Any) -> Any:
        many = tf.cast(tf.reduce_max(x * 0.0), tf.int32) + 4
        y = x[:, :many]
        y.set_shape((x.shape[0], 4))
        return y

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 4)


def _first() -> keras.Model:
    """Everything that follows sees sizes: sums, products, the largest."""
    inputs = keras.Input((6,), name="given")
    x = FirstFour(name="first")(keras.layers.Dense(6, name="wide")(inputs))
    ops = keras.ops
    seen = [x, ops.sum(x, 1, keepdims=True), ops.max(x, 1, keepdims=True), ops.softmax(x)]
    seen += [ops.std(x, 1, keepdims=True), ops.cumsum(x, 1)]
    x = keras.layers.Concatenate(name="seen")(seen)
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="first")


def _encoded() -> keras.Model:
    """What `CategoryEncoding` makes goes straight into a layer that is cut."""
    inputs = keras.Input((3,), dtype="int32", name="given")
    x = keras.layers.CategoryEncoding(6, output_mode="multi_hot", name="many")(inputs)
    x = keras.layers.Dense(8, name="up")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="encoded")


def _numbers(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 6)), labels(rng, samples), None


def _ids(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    return labels(rng, samples, 3, classes=6), labels(rng, samples), None


CASES = {
    "first": Case(name="first", build=_first, data=_numbers, layout_map=FEED_FORWARD),
    "encoded": Case(
        name="encoded", build=_encoded, data=_ids, layout_map={"up/kernel": (None, "model")}
    ),
}


@pytest.mark.parametrize(
    ("case", "level", "mesh"),
    spread(
        product(CASES, ("level0", "level3"), ("model2", "data2_model2", "pipe2_data2_model2")),
        [
            ("first", "level0", "model2"),
            ("encoded", "level3", "data2_model2"),
            ("encoded", "level0", "pipe2_data2_model2"),
            ("first", "level0", "pipe2_data2_model2"),
        ],
        quick=6,
    ),
)
def test_they_equal_one_device(case: str, level: str, mesh: str) -> None:
    config = on(mesh, level) if mesh in OVER else level_config(level)
    compare(CASES[case], {**MESHES, **OVER}[mesh], optimizer=OPTIMIZERS["adam"], config=config)


@pytest.mark.parametrize("case", CASES)
def test_batches_of_many_sizes(case: str) -> None:
    compare(
        CASES[case],
        MESHES["data2_model2"],
        optimizer=OPTIMIZERS["adam"],
        batch_size=12,
        samples=53,
        config={},
    )
