"""A generator and a discriminator, trained in turn: two models over the same layers."""

from __future__ import annotations

import functools
from typing import Any

import kdist

import keras
import numpy as np
import pytest

CUTS = {
    ".*[gd]1/kernel": (None, "model"),
    ".*[gd]1/bias": ("model",),
    ".*[gd]2/kernel": ("model", None),
}
ROWS, STEPS = 8, 4

pytestmark = pytest.mark.usefixtures("float64")


def networks() -> tuple[keras.Model, keras.Model, keras.Model]:
    """A generator, a discriminator, and the one after the other."""
    keras.utils.set_random_seed(0)
    noise, image = keras.Input((4,)), keras.Input((6,))

    def dense(units: int, name: str, activation: str | None = None) -> keras.layers.Layer:
        return keras.layers.Dense(units, activation, name=name)

    generator = keras.Model(noise, dense(6, "g2")(dense(16, "g1", "tanh")(noise)))
    discriminator = keras.Model(image, dense(1, "d2")(dense(16, "d1", "tanh")(image)))
    return generator, discriminator, keras.Model(noise, discriminator(generator(noise)))


def trained(
    axes: dict[str, int] | None = None, level: int = 0
) -> tuple[list[tuple[float, float]], list[Any]]:
    """Losses of both, step by step, and all weights, after the usual loop."""
    generator, discriminator, both = networks()
    if axes is not None:
        cuts = CUTS if "model" in axes else {}
        optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)

        def config(cuts: dict[str, Any]) -> kdist.ParallelConfig:
            mesh = kdist.mesh(**axes)
            return kdist.ParallelConfig(mesh=mesh, layout_map=cuts, optimizer=optimizer)

        both = kdist.parallelize(both, config(cuts))
        of_one = {pattern.replace("[gd]", "d"): cut for pattern, cut in cuts.items()}
        discriminator = kdist.parallelize(discriminator, config(of_one))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    discriminator.compile(keras.optimizers.Adam(1e-2), loss)
    discriminator.trainable = False
    both.compile(keras.optimizers.Adam(1e-2), loss)
    rng, found, ones = np.random.default_rng(0), [], np.ones((ROWS, 1))
    for _ in range(STEPS):
        real, noise = rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 4))
        fake = generator.predict(noise, verbose=0)
        discriminator.trainable = True
        judged = discriminator.train_on_batch(
            np.concatenate([real, fake]), np.concatenate([ones, 0 * ones])
        )
        discriminator.trainable = False
        found.append((float(judged), float(both.train_on_batch(noise, ones))))
    return found, both.get_weights()


@functools.cache
def one_device() -> tuple[list[tuple[float, float]], list[Any]]:
    return trained()


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.wide), 3])
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_networks_in_turn_equal_one_device(axes: dict[str, int], level: int) -> None:
    losses, weights = trained(axes, level)
    expected, its_weights = one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for mine, its in zip(weights, its_weights, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12)
