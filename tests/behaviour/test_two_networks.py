"""A generator and a discriminator, trained in turn: two models over the same layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

CUTS = {
    ".*[gd]1/kernel": (None, "model"),
    ".*[gd]1/bias": ("model",),
    ".*[gd]2/kernel": ("model", None),
}
ROWS, STEPS = 8, 4
KINDS = {
    "data": {"data": 4},
    "inner": {"data": 2, "model": 2},
    "pipe": {"pipe": 2, "data": 2},
}

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


def batch_step(model: keras.Model, how: str) -> Callable:
    """What trains a model by one batch, and returns the loss."""
    judge = keras.losses.BinaryCrossentropy(from_logits=True)

    def by_gradients(x: Any, y: Any) -> Any:
        loss, gradients = kdist.gradients(model, x, y)
        kdist.apply_gradients(model, gradients)
        return loss

    def by_tape(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = judge(y, model(x, training=True))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    if how == "kdist.function":
        return kdist.function(by_tape, model)
    return by_gradients if how == "kdist.gradients" else model.train_on_batch


def trained(
    axes: dict[str, int] | None = None,
    levels: tuple[int, int] = (0, 0),
    both_first: bool = False,
    how: str = "train_on_batch",
) -> tuple[list[tuple[float, float]], list[Any]]:
    """Losses of both, step by step, and all weights, after the usual loop.

    Args:
        axes: The mesh; None for one plain device.
        levels: Of the discriminator, and of both together.
        both_first: Whether the discriminator is compiled last, though it is frozen in the other.
        how: What trains; see `batch_step`.
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
    judge_step, both_step = batch_step(discriminator, how), batch_step(both, how)
    for _ in range(STEPS):
        real, noise = rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 4))
        fake = generator.predict(noise, verbose=0)
        discriminator.trainable = True
        judged = judge_step(np.concatenate([real, fake]), np.concatenate([ones, 0 * ones]))
        discriminator.trainable = False
        found.append((float(judged), float(both_step(noise, ones))))
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


@pytest.mark.parametrize("how", ["kdist.gradients", "kdist.function"])
@pytest.mark.parametrize("level", [0, 3])
def test_loops_of_ones_own_follow_what_the_other_has_moved(level: int, how: str) -> None:
    equals_one_device(trained({"data": 2, "model": 2}, (3, level), both_first=True, how=how))


def equals_one_device(found: tuple[list[tuple[float, float]], list[Any]]) -> None:
    (losses, weights), (expected, its_weights) = found, one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for mine, its in zip(weights, its_weights, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12)


def over(axes: dict[str, int], level: int) -> kdist.ParallelConfig:
    """A mesh, and a level that spreads everything."""
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    cuts = CUTS if "model" in axes else {}
    return kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts,
        optimizer=optimizer,
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
    )


def two_over_one_base() -> tuple[keras.Model, list[keras.Model]]:
    """A base, and two models that are a head over it each."""
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "tanh", name="g1")])
    base.add(keras.layers.Dense(6, "tanh", name="g2"))
    x, heads = keras.Input((4,)), [keras.layers.Dense(n, name="d1") for n in (2, 16)]
    for layer, stage in ((base, 0), (heads[0], 1), (heads[1], 1)):
        kdist.set_stage(layer, stage)  # of a pipeline: the same for both
    return base, [keras.Model(x, head(base(x))) for head in heads]


def heads(axes: dict[str, int] | None) -> list[float]:
    """Losses of two heads over one frozen base, trained in turn."""
    base, models = two_over_one_base()
    base.trainable = False
    for n, model in enumerate(models):
        if axes is not None:
            model = models[n] = kdist.parallelize(model, over(axes, level=3))
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


@pytest.mark.parametrize("axes", KINDS.values(), ids=KINDS)
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


def thawed(axes: dict[str, int] | None) -> list[Any]:
    """Losses and weights of a head at level 0, with a frozen base that another cuts and trains."""
    base, models = two_over_one_base()
    for n, (model, level) in enumerate(zip(models, (0, 3), strict=True)):
        if axes is not None:
            model = models[n] = kdist.parallelize(model, over(axes, level))
        base.trainable = level == 3
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    x, found = np.random.default_rng(0).normal(size=(ROWS, 4)), []
    for trains in (True, False):
        base.trainable = trains
        model = models[trains]
        found.append(model.train_on_batch(x, np.ones((ROWS, model.output_shape[-1]))))
    base.trainable = True
    models[0].compile(keras.optimizers.Adam(1e-2), "mse")
    found += [models[0].train_on_batch(x, np.ones((ROWS, 2))) for _ in range(2)]
    return [np.asarray(found), *models[0].get_weights()]


@pytest.mark.parametrize("axes", KINDS.values(), ids=KINDS)
def test_what_another_cut_is_whole_again_where_a_model_without_levels_thaws_it(
    axes: dict[str, int],
) -> None:
    for mine, its in zip(thawed(axes), thawed(None), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12)


def test_a_model_that_is_looked_at_leaves_weights_where_another_trains_them() -> None:
    _, models = two_over_one_base()
    first, second = models
    x, targets = np.ones((ROWS, 4)), [np.ones((ROWS, n)) for n in (2, 16)]
    for model, level in zip(models, (3, 1), strict=True):
        kdist.parallelize(model, over({"data": 4}, level))
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    for _ in range(2):
        before = first.evaluate(x, targets[0], verbose=0)
        np.testing.assert_allclose(first.predict(x, verbose=0), first(x), rtol=1e-9)
        second.train_on_batch(x, targets[1])
        assert first.evaluate(x, targets[0], verbose=0) != before
    for look in (first.plan, lambda: kdist.inspect(first)):
        with pytest.raises(ValueError, match="Compile this one again to train it. Received"):
            look()
    first.train_on_batch(x, targets[0])  # takes them
    assert str(kdist.inspect(first))


def beside_a_trained_base(levels: tuple[int, int] | None) -> list[Any]:
    """Losses and weights of a head that a step of one's own trains, over what another trains."""
    base, (first, second) = two_over_one_base()
    if levels is not None:
        for model, level in zip((first, second), levels, strict=True):
            kdist.parallelize(model, over({"data": 4}, level))
    first.compile(keras.optimizers.SGD(1e-2), "mse")
    optimizer, loss = keras.optimizers.SGD(1e-2), keras.losses.MeanSquaredError()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, second(x, training=True))
        weights = second.trainable_variables
        optimizer.apply(tape.gradient(value, weights), weights)
        return value

    train = step if levels is None else kdist.function(step, second)
    x, found = np.random.default_rng(0).normal(size=(ROWS, 4)), []
    for _ in range(2):
        base.trainable = False
        found.append(float(train(tf.constant(x), tf.ones((ROWS, 16), tf.float64))))
        base.trainable = True
        found.append(first.train_on_batch(x, np.ones((ROWS, 2))))
    return [np.asarray(found), *first.get_weights(), *second.get_weights()]


def test_a_first_step_of_ones_own_leaves_frozen_weights_where_another_trains_them() -> None:
    for mine, its in zip(beside_a_trained_base((3, 3)), beside_a_trained_base(None), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("levels", [(3, 0), (0, 3)])
def test_a_model_compiled_without_an_optimizer_leaves_weights_where_another_trains_them(
    levels: tuple[int, int],
) -> None:
    _, models = two_over_one_base()
    first, second = models
    for model, level in zip(models, levels, strict=True):
        kdist.parallelize(model, over({"data": 4}, level))
    x, targets = np.ones((ROWS, 4)), [np.ones((ROWS, n)) for n in (2, 16)]
    first.compile(keras.optimizers.SGD(1e-2), "mse")
    second.compile(None, "mse")
    for _ in range(2):
        before = second.evaluate(x, targets[1], verbose=0)
        first.train_on_batch(x, targets[0])
        assert second.evaluate(x, targets[1], verbose=0) != before
    assert second.plan().weights[0].gathered == (levels[0] == 3)
    assert str(kdist.inspect(second))
