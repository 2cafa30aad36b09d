"""The user's own functions, traced before the weights that they use moved."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.storage.variables import materialised, parts_of

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import config, data, mlp

pytestmark = pytest.mark.usefixtures("float64")

X, Y = data(8)


class Drawing(keras.Model):
    """Draws by a method, and by a function that it keeps as Keras's models keep theirs."""

    draw_function: Any = None

    @tf.function
    def draw(self, inputs: Any) -> Any:
        return self(inputs)

    def make_draw_function(self) -> Any:
        if self.draw_function is None:
            compiled = getattr(self, "jit_compile", True)
            self.draw_function = tf.function(self.call, jit_compile=compiled)
        return self.draw_function


def drawing() -> Drawing:
    inner = mlp()
    return Drawing(inner.inputs, inner.outputs)


def drawn(model: Drawing, beside: Any) -> list[Any]:
    """What a model draws: by itself, and by functions that should agree."""
    return [way(X) for way in (model, model.draw, model.make_draw_function(), beside)]


@pytest.mark.parametrize("level", [3, 0])
@pytest.mark.parametrize(
    "axes",
    [{"data": 2, "model": 2}, {"data": 4}, {"pipe": 2, "data": 1}],
    ids=["inner", "data", "pipe"],
)
def test_functions_follow_weights(axes: dict[str, int], level: int) -> None:
    """`draw_function` was for XLA, which reads variables of one device, and is made anew."""
    model = drawing()
    model.compile("sgd", "mse", jit_compile=True)
    beside = tf.function(lambda x: model(x))
    before = drawn(model, beside)
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    pipeline = kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None
    kdist.parallelize(model, config(axes, optimizer=optimizer, pipeline=pipeline))
    for found in drawn(model, beside):
        np.testing.assert_allclose(found, before[0], rtol=1e-12)
    for _ in range(2):
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, Y, verbose=0)
        now = drawn(model, beside)
        for found in now:
            np.testing.assert_allclose(found, now[0], rtol=1e-12)
        assert np.abs(now[0] - before[0]).max() > 1e-4


def test_functions_traced_by_an_export_follow_weights() -> None:
    model = drawing()
    kdist.parallelize(model, config({"data": 2, "model": 2}))
    model.compile("sgd", "mse")
    with materialised(model.weights):
        model.draw(X)
    model.fit(X, Y, verbose=0)
    np.testing.assert_allclose(model.draw(X), model(X), rtol=1e-12)


def test_what_a_function_writes_reaches_all_copies() -> None:
    model = drawing()
    bias = model.get_layer("down").bias
    more = tf.function(lambda: bias.assign_add([1.0, 1, 1]))
    more()
    kdist.parallelize(model, config({"data": 4}))
    more()
    for part in parts_of(bias):
        np.testing.assert_allclose(part.target.value, [2, 2, 2])


class Turned(keras.layers.Layer):
    """Has a function of its own, which the making of a Functional model traces."""

    def build(self, shape: Any) -> None:
        """See `keras.Layer`."""
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    @tf.function
    def call(self, inputs: Any) -> Any:
        """See `keras.Layer`."""
        return keras.ops.matmul(inputs, self.kernel)


def trained_turned(axes: dict[str, int] | None) -> tuple[list[float], list[Any]]:
    """Losses, and outputs and weights, of a model with such a layer."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input(X.shape[1:])
    outputs = keras.layers.Dense(Y.shape[-1])(Turned(name="turned")(inputs))
    model = keras.Model(inputs, outputs)
    if axes is not None:
        pipeline = kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None
        layouts = {"turned/kernel": (None, "model")} if "model" in axes else None
        given = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts, pipeline=pipeline)
        kdist.parallelize(model, given)
    model.compile("sgd", "mse")
    losses = model.fit(X, Y, epochs=3, shuffle=False, verbose=0).history["loss"]
    losses.append(model.evaluate(X, Y, verbose=0))
    return losses, [
        model.predict(X, verbose=0),
        model(X),
        *(keras.ops.convert_to_numpy(w) for w in model.weights),
    ]


@pytest.mark.parametrize(
    "axes",
    [{"data": 4}, {"data": 2, "model": 2}, {"pipe": 2, "data": 1}],
    ids=["data", "inner", "pipe"],
)
def test_weights_inside_functions_of_layers_are_trained(axes: dict[str, int]) -> None:
    """Each trace of the model needs its own: another one took variables, or values, of its own."""
    losses, weights = trained_turned(None)
    found, now = trained_turned(axes)
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    for one, other in zip(now, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
