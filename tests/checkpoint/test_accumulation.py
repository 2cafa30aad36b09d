"""State saved within a cycle of gradient accumulation counts once, wherever it goes."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import kdist

import keras
import numpy as np
import pytest

from ..equivalence.harness import precision
from ..equivalence.matrix import product, spread

CYCLE, BEFORE, AFTER = 4, 6, 3
"""The state is saved after half a cycle; the steps that follow end it."""

LAYOUTS = {"up/kernel": (None, "model"), "up/bias": ("model",)}
MESHES: dict[str, dict[str, int]] = {
    "data2": {"data": 2},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}
PLAIN = "plain"
PLACES = (PLAIN, *(f"{mesh}-level{level}" for mesh, level in product(MESHES, range(4))))
DEFAULT = [
    ("data2-level1", "data2-level1"),
    (PLAIN, "data2_model2-level2"),
    ("data2_model2-level3", "data2-level0"),
    ("data2-level0", "pipe2_data2-level3"),
    ("pipe2_data2-level1", PLAIN),
]


@pytest.fixture(autouse=True)
def float64():
    with precision("float64"):
        yield


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=CYCLE)


def static_scale() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=CYCLE, loss_scale_factor=6.0)


def dynamic_scale() -> keras.optimizers.Optimizer:
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=CYCLE)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=3)


def parallel(model: keras.Model, place: str, **options: Any) -> keras.Model:
    """The model where a place says; plain for `PLAIN`."""
    if place == PLAIN:
        return model
    mesh, level = place.split("-level")
    settings: dict[str, Any] = {"layout_map": LAYOUTS if "model" in mesh else None}
    if "pipe" in mesh:
        settings["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    optimizer = kdist.OptimizerConfig(level=int(level), threshold_kb=0, **options)
    mesh = kdist.mesh(**MESHES[mesh])
    return kdist.parallelize(
        model, kdist.ParallelConfig(mesh=mesh, optimizer=optimizer, **settings)
    )


def build(place: str, optimizer: Any = momentum, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(21)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="up")(inputs)
    x = keras.layers.Dense(8, activation="tanh", name="middle")(x)
    model = parallel(keras.Model(inputs, keras.layers.Dense(3, name="head")(x)), place, **options)
    model.compile(optimizer(), "mse")
    return model


def steps(model: keras.Model, first: int, count: int) -> None:
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(8, 6)), draw.normal(size=(8, 3))
    for n in range(first, first + count):
        model.train_on_batch(x + n / 10, y)


def weights(model: keras.Model) -> list[np.ndarray]:
    found = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in found]


@functools.cache
def unbroken(optimizer: Any) -> list[np.ndarray]:
    """What one device has at the end."""
    model = build(PLAIN, optimizer)
    steps(model, 0, BEFORE + AFTER)
    return weights(model)


def check(model: keras.Model, optimizer: Any) -> None:
    """It goes on as one device would have."""
    steps(model, BEFORE, AFTER)
    for a, b in zip(weights(model), unbroken(optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@functools.cache
def saved(place: str, optimizer: Any) -> str:
    model = build(place, optimizer)
    steps(model, 0, BEFORE)
    directory = tempfile.mkdtemp()
    kdist.checkpoint.save(model, directory)
    return directory


@pytest.mark.parametrize(
    ("source", "target"), spread(product(PLACES, PLACES), DEFAULT, quick=len(DEFAULT))
)
def test_half_a_cycle_goes_on_anywhere(source, target):
    model = build(target)
    kdist.checkpoint.restore(model, saved(source, momentum))
    check(model, momentum)


@pytest.mark.parametrize("optimizer", [static_scale, dynamic_scale])
@pytest.mark.parametrize(
    ("source", "target"), [("data2-level0", "data2-level1"), ("data2-level1", PLAIN)]
)
def test_sums_of_scaled_gradients_mean_the_same_anywhere(optimizer, source, target):
    model = build(target, optimizer)
    kdist.checkpoint.restore(model, saved(source, optimizer))
    check(model, optimizer)


@pytest.mark.parametrize("place", ["data2-level1", "data2_model2-level3"])
def test_sums_in_a_keras_file_count_once(tmp_path, place):
    model = build(place)
    steps(model, 0, BEFORE)
    model.save(tmp_path / "model.keras")
    again = parallel(keras.models.load_model(tmp_path / "model.keras"), place)
    check(again, momentum)


def test_sums_kept_as_shards_go_on_as_sums_of_replicas():
    model = build("data2-level1", gradient_accumulation_shard=True)
    kdist.checkpoint.restore(model, saved("data2-level1", momentum))
    check(model, momentum)


def test_a_model_that_trains_already_goes_back_within_a_cycle():
    model = build("data2-level1")
    steps(model, 50, 3)
    kdist.checkpoint.restore(model, saved("data2-level3", momentum))
    check(model, momentum)


def test_a_plain_model_becomes_parallel_within_a_cycle():
    model = build(PLAIN)
    steps(model, 0, BEFORE)
    check(parallel(model, "data2-level1"), momentum)
