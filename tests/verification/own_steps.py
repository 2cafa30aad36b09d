"""Models with a `train_step` of their own, and meshes to compare them on."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Own(keras.Model):
    """Two losses, one of them by hand; names of logs are its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            size = ops.mean(ops.square(found))
            loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=weight) + 0.1 * size
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {**self.compute_metrics(x, y, found, weight), "far": loss, "size": size}


def model(kind: type = Own) -> keras.Model:
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    return kind(first, layers.Dense(3, name="down")(hidden))


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(12, 6)), rng.normal(size=(12, 3))


CUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "data": ({"data": 3}, 0),
    "inner": ({"data": 2, "model": 2}, 0),
    "level 3": ({"data": 4}, 3),
}


def over(mesh: str, one: keras.Model, **options: Any) -> keras.Model:
    axes, level = MESHES[mesh]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=CUTS if "model" in axes else {},
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
        **options,
    )
    return kdist.parallelize(one, config)


def over_plain(mesh: str, one: keras.Model, **options: Any) -> keras.Model:
    """Over a mesh, with no weight cut by the layout map."""
    axes, level = MESHES[mesh]
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=optimizer, **options)
    return kdist.parallelize(one, config)


@keras.saving.register_keras_serializable("kdist_tests")
class Coder(keras.Model):
    """Without `call`; its step takes inputs alone, draws, and keeps a statistic."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        first, last = keras.Input((6,)), keras.Input((width,))
        hidden = layers.Dropout(0.3)(layers.Dense(width, "tanh")(first))
        self.encoder = keras.Model(first, hidden)
        self.decoder = keras.Model(last, layers.Dense(6)(layers.BatchNormalization()(last)))
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean((self.decoder(self.encoder(x, training=True), training=True) - x) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"far": loss}
