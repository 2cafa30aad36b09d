"""Prediction advances what layers draw and count, as on one device."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers


class AlwaysDrops(layers.Dropout):
    """Dropout in prediction too, as Monte Carlo estimates of uncertainty use it."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return super().call(inputs, training=True)


class Counts(layers.Layer):
    """Counts its calls."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1.0)
        return inputs


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((6,))
    x = AlwaysDrops(0.5, seed=3)(layers.Dense(8, name="up")(x))
    return keras.Model(inputs, layers.Dense(4, name="head")(Counts(name="counts")(x)))


def predicted(model: keras.Model) -> tuple[list[np.ndarray], float, np.ndarray]:
    """Two predictions of three batches, the calls that were counted, the seed afterwards."""
    x = np.random.default_rng(0).normal(size=(12, 6))
    twice = [model.predict(x, batch_size=4, verbose=0) for _ in range(2)]
    (seed,) = [keras.ops.convert_to_numpy(v) for v in model.variables if "seed" in v.path]
    return twice, float(keras.ops.convert_to_numpy(model.get_layer("counts").calls)), seed


MESHES = {
    "data4": ({"data": 4}, 0),
    "level3": ({"data": 4}, 3),
    "data2_model2": ({"data": 2, "model": 2}, 0),
    "pipe2_data2": ({"pipe": 2, "data": 2}, 0),
}


@pytest.mark.parametrize("name", MESHES)
def test_predictions_draw_on_and_count(name: str) -> None:
    axes, level = MESHES[name]
    staged = "pipe" in axes
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map={".*up/kernel": (None, "model")} if "model" in axes else None,
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        pipeline=kdist.PipelineConfig(micro_batches=2) if staged else None,
    )
    model = kdist.parallelize(build(), config)
    model.compile("sgd", "mse")
    _, calls, seed = predicted(build())
    (first, second), parallel_calls, parallel_seed = predicted(model)
    assert np.abs(first - second).max() > 0.1
    # Each micro-batch is a call of its own.
    assert parallel_calls == calls * (2 if staged else 1)
    np.testing.assert_array_equal(parallel_seed, seed * [1, 2 if staged else 1])
