"""Calls of layers in branches and loops of a step: on one device, and with their gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.usefixtures("float64")

CUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh", name="up")(first)
    return keras.Model(first, keras.layers.Dense(3, name="down")(hidden))


def in_branch(model: keras.Model, x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) < 100.0, lambda: model(x), lambda: tf.zeros((8, 3), x.dtype))


def in_loop(model: keras.Model, x: Any) -> Any:
    def body(i: Any, found: Any) -> tuple[Any, Any]:
        return i + 1, found + model(x * tf.cast(i, x.dtype))

    return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros((8, 3), x.dtype)))[1]


def in_map(model: keras.Model, x: Any) -> Any:
    return tf.map_fn(lambda row: model(row[None])[0], x, fn_output_signature=x.dtype)


def in_vectorized_map(model: keras.Model, x: Any) -> Any:
    return tf.vectorized_map(lambda row: model(row[None])[0], x)


def weight_in_branch(model: keras.Model, x: Any) -> Any:
    """A weight that is read itself, beside a call over the mesh."""
    kernel = model.get_layer("down").kernel
    square = tf.cond(tf.reduce_sum(x) < 100.0, lambda: tf.square(kernel), lambda: 2.0 * kernel)
    return model(x) + tf.reduce_sum(square)


FLOWS = (in_branch, in_loop, in_map, in_vectorized_map, weight_in_branch)


def losses(flow: Callable, model: keras.Model, graph: Callable) -> list[np.ndarray]:
    """Losses of three steps, and the weights."""
    optimizer = keras.optimizers.Adam(0.01)
    x = np.random.default_rng(0).normal(size=(8, 6))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(flow(model, x) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    run = graph(step)
    found = [run(tf.constant(x)).numpy() for _ in range(3)]
    return [*found, *(v.numpy() for v in model.trainable_variables)]


@pytest.mark.parametrize("mesh", ["data 2 x model 2", "data 2, level 3"])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda one: one.__name__)
def test_they_equal_one_device(flow: Callable, mesh: str) -> None:
    expected = losses(flow, network(), tf.function)
    inner = "model" in mesh
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2, model=2) if inner else kdist.mesh(data=2),
        layout_map=CUTS if inner else {},
        optimizer=kdist.OptimizerConfig(level=0 if inner else 3, threshold_kb=0),
    )
    model = kdist.parallelize(network(), config)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = losses(flow, model, lambda step: kdist.function(step, model))
    told = [one for one in said if "computes on one device, on whole weights" in str(one.message)]
    assert bool(told) == (flow is not weight_in_branch)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
