"""A model whose step is its own, plain and over a mesh."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

CUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
MESHES = [{"data": 4}, {"data": 2, "model": 2}]
IDS = ["data", "inner"]


class Own(keras.Model):
    """A model whose step does what a function says."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"far": loss, "rows": ops.shape(keras.tree.flatten(x)[0])[0]}

    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.mean((self(x, training=True) - y) ** 2)


def layer_of_two(kind: type = Own, middle: Any = None) -> keras.Model:
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    hidden = hidden if middle is None else middle(hidden)
    return kind(first, layers.Dense(3, name="down")(hidden))


def batch(rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)), rng.normal(size=(rows, 3))


def pair(
    axes: dict[str, int], kind: type = Own, batch_semantics: str = "replica", **options: Any
) -> list[keras.Model]:
    """The model plain, and over a mesh."""
    models = [layer_of_two(kind) for _ in range(2)]
    cuts = CUTS if "model" in axes else {}
    mesh = kdist.mesh(**axes)
    config = kdist.ParallelConfig(mesh=mesh, layout_map=cuts, batch_semantics=batch_semantics)
    kdist.parallelize(models[1], config)
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), **options)
    return models


def same(models: list[keras.Model]) -> None:
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


class TwoParts(Own):
    """Applies one optimizer to other weights from step to step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for weights in self.groups():
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y)
            self.other.apply(tape.gradient(loss, weights), weights)
        return {"far": loss}
