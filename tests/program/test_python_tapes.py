"""Layers with Python functions: a gradient of a tape that calls share is refused."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

X = np.random.default_rng(0).normal(size=(10, 6))
Y = np.random.default_rng(1).normal(size=(10, 3))
MESHES = {
    "data2": {"data": 2},
    "model2": {"data": 1, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}

pytestmark = pytest.mark.usefixtures("float64")


class Taped(layers.Layer):
    """Whose gradient TensorFlow takes from a tape in Python."""

    def call(self, x: Any) -> Any:
        """See `keras.Layer`."""
        return tf.ensure_shape(tf.py_function(tf.tanh, [x], x.dtype), x.shape)


class Told(layers.Layer):
    """The same, with a gradient of its own."""

    def call(self, x: Any) -> Any:
        """See `keras.Layer`."""

        def python(function: Any, *given: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(function, given, x.dtype), x.shape)

        @tf.custom_gradient
        def tanh(x: Any) -> Any:
            y = python(np.tanh, x)
            return y, lambda dy: python(lambda y, dy: dy * (1 - y * y), y, dy)

        return tanh(x)


def trained(layer: layers.Layer, mesh: str = "", level: int = 0) -> list[Any]:
    keras.utils.set_random_seed(0)
    first, last = layers.Dense(4, name="up"), layers.Dense(3, name="head")
    model = keras.Sequential([keras.Input((6,)), first, layer, last])
    if mesh:
        axes = MESHES.get(mesh, {"data": 1})
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**axes),
            layout_map={".*up/kernel": (None, "model")} if "model" in axes else None,
            optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
            pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
        )
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [history.history["loss"], *model.get_weights()]


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_tape_that_calls_share_is_refused(mesh: str, level: int) -> None:
    with pytest.raises(ValueError, match=r"Write it as a tf.custom_gradient .*EagerPyFunc', in '"):
        trained(Taped(), mesh, level)


@pytest.mark.parametrize(("layer", "mesh"), [(Taped, "data1"), *((Told, m) for m in MESHES)])
def test_what_runs_equals_one_device(layer: Any, mesh: str) -> None:
    for one, other in zip(trained(layer(), mesh), trained(layer()), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
