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
    axes: dict[str, int] | None = None, levels: tuple[int, int] = (0, 0), both_first: bool = False
) -> tuple[list[tuple[float, float]], list[Any]]:
    """Losses of both, step by step, and all weights, after the usual loop.

    Args:
        axes: The mesh; None for one plain device.
        levels: Of the discriminator, and of both together.
        both_first: Whether the discriminator is compiled last, though it is frozen in the other.
    """
    generator, discriminator, both = networks()
    if axes is not None:
        cuts = CUTS if "model" in axes else {}

        def config(cuts: dict[str, Any], level: int) -> kdist.ParallelConfig:
            mesh = kdist.mesh(**axes)
            optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
            return kdist.ParallelConfig(mesh=mesh, layout_map=cuts, optimizer=optimizer)

        both = kdist.parallelize(both, config(cuts, levels[1]))
        of_one = {pattern.replace("[gd]", "d"): cut for pattern, cut in cuts.items()}
        discriminator = kdist.parallelize(discriminator, config(of_one, levels[0]))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    for of_both in (True, False) if both_first else (False, True):
        model = both if of_both else discriminator
        discriminator.trainable = not of_both
        model.compile(keras.optimizers.Adam(1e-2), loss)
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
    equals_one_device(trained(axes, (level, level)))


@pytest.mark.parametrize("both_first", [False, True])
@pytest.mark.parametrize("levels", [(3, 2), (2, 3), (3, 0), (0, 3), (3, 3)])
def test_each_has_a_level_of_its_own(levels: tuple[int, int], both_first: bool) -> None:
    equals_one_device(trained({"data": 2, "model": 2}, levels, both_first))


def equals_one_device(found: tuple[list[tuple[float, float]], list[Any]]) -> None:
    (losses, weights), (expected, its_weights) = found, one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for mine, its in zip(weights, its_weights, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12)


def heads(axes: dict[str, int] | None) -> list[float]:
    """Losses of two heads over one frozen base, trained in turn."""
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "tanh", name="g1")])
    base.add(keras.layers.Dense(6, "tanh", name="g2"))
    base.trainable = False
    x = keras.Input((4,))
    models = [keras.Model(x, keras.layers.Dense(n, name="d1")(base(x))) for n in (2, 16)]
    for n, model in enumerate(models):
        if axes is not None:
            cuts = CUTS if "model" in axes else {}
            optimizer = kdist.OptimizerConfig(level=3, threshold_kb=0)
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(**axes), layout_map=cuts, optimizer=optimizer
            )
            model = models[n] = kdist.parallelize(model, config)
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    rng, found = np.random.default_rng(0), []
    for _ in range(3):
        x = rng.normal(size=(ROWS, 4))
        found += [float(m.train_on_batch(x, np.ones((ROWS, m.output_shape[-1])))) for m in models]
    models[1].compile(keras.optimizers.SGD(1e-2), "mse")  # decides about its head, not the base
    found += [float(m.train_on_batch(x, np.ones((ROWS, m.output_shape[-1])))) for m in models]
    base.trainable = True
    models[1].compile(keras.optimizers.SGD(1e-2), "mse")
    found.append(float(models[1].train_on_batch(x, np.ones((ROWS, 16)))))
    base.trainable = False
    found.append(float(models[0].train_on_batch(x, np.ones((ROWS, 2)))))
    return found


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_two_heads_over_a_frozen_base_equal_one_device(axes: dict[str, int]) -> None:
    np.testing.assert_allclose(heads(axes), heads(None), rtol=1e-9)


def test_that_another_model_keeps_frozen_weights_whole_is_told() -> None:
    mesh, (_, base, _) = kdist.mesh(data=4), networks()
    head = keras.layers.Dense(4, name="head")
    tuned = keras.Model(base.input, head(base.get_layer("d1").output))
    for model, level in ((base, 2), (tuned, 3)):
        levels = kdist.OptimizerConfig(level=level, threshold_kb=0)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, optimizer=levels))
        model.compile("sgd", "mse")
        base.trainable = False
    told = "another parallel model.*Compile that model with level 3 too"
    with pytest.warns(UserWarning, match=told):
        tuned.train_on_batch(np.ones((ROWS, 6)), np.ones((ROWS, 4)))
    assert [one.gathered for one in tuned.plan().weights] == [False, False, True, True]
