"""Data that runs out in the middle of `fit`: training stops, and goes on, as on one device.

Keras's graph of a step counts it and decays weights before it learns that no batch came. On one
device that happens whole; so it must on every mesh, and not on some of its devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kdist
from kdist.optimizer.update import DistributedUpdate

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..equivalence.matrix import spread

MESHES: dict[str, dict[str, int]] = {
    "data2": {"data": 2},
    "data2_level2": {"data": 2},
    "pipe2": {"pipe": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, weight_decay=0.1),
    "accumulation": lambda: keras.optimizers.AdamW(0.1, gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.1)),
}
ROWS = [(m, o, s) for m in MESHES for o in OPTIMIZERS for s in (1, 2)]
DEFAULT = [
    ("data2", "adamw", 1),
    ("pipe2_data2", "adamw", 1),
    ("data2_model2", "adamw", 1),
    ("data2_level2", "nadam", 1),
]


def build(mesh: str) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8,))
    x = keras.layers.Dense(8, "tanh", name="first")(x)
    model = keras.Model(inputs, keras.layers.Dense(8, name="second")(x))
    if axes := MESHES.get(mesh):
        options: dict[str, Any] = {}
        if "pipe" in axes:
            options["pipeline"] = kdist.PipelineConfig(micro_batches=2)
        if "model" in axes:
            options["layout_map"] = {"first/kernel": (None, "model")}
        if mesh.endswith("level2"):
            options["optimizer"] = kdist.OptimizerConfig(level=2, threshold_kb=0)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    return model


def batches(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(count)
    for _ in range(count):
        yield rng.normal(size=(8, 8)), rng.normal(size=(8, 8))


def trained(mesh: str, optimizer: str, steps_per_execution: int) -> list[np.ndarray]:
    """Losses, step counts and weights of two runs that ask for more than there is."""
    model = build(mesh)
    model.compile(OPTIMIZERS[optimizer](), "mse", steps_per_execution=steps_per_execution)
    found = []
    for count in (3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says that the data ran out
            log = model.fit(batches(count), epochs=2, steps_per_epoch=count - 1, verbose=0)
        found += [np.array(log.history["loss"]), model.optimizer.iterations.numpy()]
        found += model.get_weights()
    return found


@pytest.mark.parametrize(("mesh", "optimizer", "steps_per_execution"), spread(ROWS, DEFAULT))
def test_training_goes_on_as_on_one_device(
    mesh: str, optimizer: str, steps_per_execution: int, float64: None
) -> None:
    expected = trained("plain", optimizer, steps_per_execution)
    actual = trained(mesh, optimizer, steps_per_execution)
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)


def test_what_follows_the_last_batch_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced again for every epoch, it took time, and TensorFlow warned of it."""
    traced: list[object] = []
    own = DistributedUpdate.without_batch

    def noted(self: DistributedUpdate, connected: Sequence[int]) -> None:
        traced.append(connected)
        own(self, connected)

    monkeypatch.setattr(DistributedUpdate, "without_batch", noted)
    model = build("data2")
    model.compile("adamw", "mse")
    data = tf.data.Dataset.from_generator(
        lambda: batches(2), output_signature=(tf.TensorSpec((8, 8), tf.float64),) * 2
    )
    model.fit(data, epochs=3, verbose=0)
    assert len(traced) == 1
    model.compile("adamw", "mse")
    model.fit(data, epochs=2, verbose=0)
    assert len(traced) == 2


def test_keras_counts_and_decays_without_a_batch() -> None:
    """What the rows above rest on; if Keras mends it, `without_batch` can go."""
    decayed = trained("plain", "adamw", 1)
    kept = trained("plain", "adamw", 2)
    assert (int(decayed[1]), int(kept[1])) == (4, 3)
    assert np.abs(decayed[2]).sum() < np.abs(kept[2]).sum()


@pytest.mark.parametrize("mesh", ["data2", "pipe2_data2", "data2_model2"])
def test_losses_are_of_the_batches_that_came(mesh: str) -> None:
    """Keras counts the rows of a batch, whose size is known, before it learns that none came."""
    model, x = build(mesh), np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    model.compile("sgd", "mse", metrics=["mse"])
    data = tf.data.Dataset.from_tensor_slices((x, x)).filter(lambda a, b: True)
    data = data.batch(16, drop_remainder=True)
    wanted = np.mean((model.predict(x[:32], verbose=0) - x[:32]) ** 2)
    assert model.evaluate(data, verbose=0) == pytest.approx([wanted, wanted], rel=1e-5)


@pytest.mark.parametrize("mesh", ["data2", "data2_level2"])
def test_where_keras_compiles_with_xla_nothing_runs_without_a_batch(
    mesh: str, float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were a GPU; kdist's programs are cut at level 2, and XLA is left out there."""
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda self: True)
    expected, actual = trained("plain", "adamw", 1), trained(mesh, "adamw", 1)
    assert int(expected[1]) == 3
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
