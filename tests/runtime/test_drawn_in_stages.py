"""What a layer of a stage draws without a seed of Keras, or makes in Python, both passes see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

WIDTH = 8


def _by_tensorflow() -> Any:
    return tf.random.normal((WIDTH,), dtype=tf.float64)


def _by_numpy() -> Any:
    made = tf.numpy_function(lambda: np.random.normal(size=WIDTH), [], tf.float64)
    made.set_shape((WIDTH,))
    return made


class Noise(keras.layers.Layer):
    """Adds what is drawn, times a weight for each column."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(name="noise")
        self.draw = draw

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return x + self.scale * self.draw()

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "model": 2}], ids=["plain", "inner"])
@pytest.mark.parametrize("draw", [_by_tensorflow, _by_numpy])
def test_the_backward_pass_sees_what_was_drawn(
    draw: Callable[[], Any], axes: dict[str, int], float64: None
) -> None:
    tf.random.set_seed(None)  # with one, each of two operations would draw the same

    def dense(name: str) -> keras.layers.Dense:
        return keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="identity", name=name)

    noise = Noise(draw)
    model = keras.Sequential([keras.Input((WIDTH,)), dense("up"), noise, dense("down")])
    layouts = {".*noise/scale": ("model",), ".*down/kernel": ("model", None)}
    kdist.parallelize(
        model,
        kdist.ParallelConfig(
            mesh=kdist.mesh(**axes),
            layout_map=layouts if "model" in axes else None,
            pipeline=kdist.PipelineConfig(micro_batches=1, stages={"up|noise": 0, "down": 1}),
        ),
    )
    model.compile(keras.optimizers.SGD(float(WIDTH)), lambda y, found: keras.ops.mean(found, -1))
    zeros = np.zeros((4, WIDTH))
    # The loss is the mean of the noise, and the gradient of a scale its noise, over their number.
    loss = model.train_on_batch(zeros, zeros)
    np.testing.assert_allclose(np.mean(1 - noise.scale.numpy()), loss, rtol=1e-5)


def test_draws_from_the_seed_of_all_are_refused_and_told_what_to_do() -> None:
    noise = Noise(lambda: keras.random.normal((WIDTH,)))
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), noise])
    model = kdist.PipelineModel(model, stages=2, micro_batches=1)
    model.compile("sgd", "mse")
    zeros = np.zeros((4, WIDTH))
    with pytest.raises(ValueError, match=r"seed=self\.seed_generator.*layers noise"):
        model.train_on_batch(zeros, zeros)
