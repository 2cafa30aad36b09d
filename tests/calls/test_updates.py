"""Optimizers that a step of the user's own applies: wrappers, and levels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

MESHES = {"data": {"data": 4}, "inner": {"data": 2, "model": 2}}
CUTS = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}

pytestmark = pytest.mark.usefixtures("float64")


class Tripled(keras.optimizers.SGD):
    """An optimizer of the user's own: what it does with gradients counts, once."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([3.0 * g for g in grads], trainable_variables)


class TripledPairs(keras.optimizers.SGD):
    """The same in the other method."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(3.0 * g, v) for g, v in grads_and_vars])


class Stepped(keras.Model):
    def __init__(self, own: Any) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        first = keras.Input((6,))
        hidden = layers.Dense(8, "tanh", name="up")(first)
        self.network = keras.Model(first, layers.Dense(3, name="down")(hidden))
        self.own = own

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        applied = self.own or self.optimizer
        with tf.GradientTape() as tape:
            far = ops.mean((self.network(x, training=True) - y) ** 2)
            loss = applied.scale_loss(far)
        weights = self.network.trainable_weights
        applied.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"far": far, "again": far}


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def sharded() -> Any:
    return kdist.ShardedOptimizer(adam(), level=1, threshold_kb=0)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sharded": (sharded, adam),
    "scaled and sharded": (
        lambda: keras.optimizers.LossScaleOptimizer(sharded()),
        lambda: keras.optimizers.LossScaleOptimizer(adam()),
    ),
    "own apply": (lambda: Tripled(0.1), lambda: Tripled(0.1)),
    "own apply_gradients": (lambda: TripledPairs(0.1), lambda: TripledPairs(0.1)),
    "whole tensors": (lambda: keras.optimizers.Lamb(0.01), lambda: keras.optimizers.Lamb(0.01)),
}


def trained(
    optimizer: Any,
    besides: bool,
    axes: dict[str, int] | None,
    /,
    build: bool = False,
    **options: Any,
) -> Any:
    model = Stepped(optimizer if besides else None)
    if axes is not None:
        cuts = CUTS if "model" in axes else {}
        config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, **options)
        kdist.parallelize(model, config)
    if build:
        optimizer.build(model.network.trainable_variables)
    model.compile(keras.optimizers.SGD(0.1) if besides else optimizer)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 3))
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("besides", [False, True], ids=["compiled", "besides"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_one_device(name: str, mesh: str, besides: bool) -> None:
    over, plain = OPTIMIZERS[name]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(over(), besides, MESHES[mesh], build=besides and "scaled" in name)
    told = ["overrides apply" in str(one.message) for one in said]
    assert any(told) == ("own" in name)
    for one, other in zip(trained(plain(), besides, None), found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


def test_level_3_is_said_before_weights_are_placed() -> None:
    optimizer = kdist.ShardedOptimizer(adam(), level=3, threshold_kb=0)
    with pytest.raises(ValueError, match=r"ParallelConfig\(optimizer=.*level=3, weights placed"):
        trained(optimizer, True, {"data": 2})


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("loop", [False, True], ids=["train_step", "function"])
def test_a_scale_that_grows(mesh: str, loop: bool) -> None:
    """Keras traces a step again once the optimizer is built: its first trace has no scale yet."""
    x, y = np.random.default_rng(0).normal(size=(8, 6)), np.zeros((8, 3))

    def run(optimizer: Any, axes: dict[str, int] | None) -> Any:
        model: Any = Stepped(None)
        model.network(x)
        model = model.network if loop else model
        if axes is not None:
            cuts = CUTS if "model" in axes else None
            config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts)
            kdist.parallelize(model, config)
        model.compile(optimizer, "mse")
        if not loop:
            model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
            return model.get_weights()

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = model.optimizer.scale_loss(ops.mean((model(x, training=True) - y) ** 2))
            gradients = tape.gradient(loss, model.trainable_weights)
            model.optimizer.apply(gradients, model.trainable_weights)

        made = tf.function(step) if axes is None else kdist.function(step, model)
        for _ in range(6):
            made(tf.constant(x), tf.constant(y))
        return model.get_weights()

    inner = keras.optimizers.SGD
    growing = keras.optimizers.LossScaleOptimizer(inner(0.1), dynamic_growth_steps=1)
    for a, b in zip(run(inner(0.1), None), run(growing, MESHES[mesh]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_another_scale_is_built_first() -> None:
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"Call optimizer.build\(variables\)"):
        trained(own, True, MESHES["data"])


AT_LEVEL_3 = {
    "kept": {"keep_gathered": True},
    "dealt": {"partition": "parameter"},
    "sums cut": {"gradient_accumulation_shard": True},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", AT_LEVEL_3)
def test_settings_of_level_3(name: str, mesh: str) -> None:
    """They are about weights that are stored cut, which each optimizer updates where they are."""
    config = kdist.OptimizerConfig(level=3, threshold_kb=0, **AT_LEVEL_3[name])

    def several() -> Any:
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)

    found = trained(several(), True, MESHES[mesh], optimizer=config)
    for one, wanted in zip(found, trained(several(), True, None), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-9, atol=1e-12)


class InTwo(Stepped):
    """Trains the first layer with an optimizer of its own, before the compiled one the other."""

    parts = (slice(2), slice(2, 4))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.network.trainable_weights
        with tf.GradientTape() as tape:
            far = ops.mean((self.network(x, training=True) - y) ** 2)
        gradients = tape.gradient(far, weights)
        for optimizer, part in zip((self.own, self.optimizer), self.parts):
            optimizer.apply(gradients[part], weights[part])
        return {"far": far}


class Overlapping(InTwo):
    parts = (slice(2), slice(4))


WITH_COPIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "state on the host": (adam, {"optimizer": kdist.OptimizerConfig(state_on="host")}),
    "whole tensors": (lambda: keras.optimizers.Lamb(0.01), {}),
}


def in_two(kind: type[InTwo], name: str, axes: dict[str, int] | None) -> Any:
    optimizer, options = WITH_COPIES[name]
    model = kind(optimizer())
    if axes is not None:
        cuts = CUTS if "model" in axes else None
        config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, **options)
        kdist.parallelize(model, config)
    model.compile(optimizer())
    return model


def fitted(model: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6)), rng.normal(size=(16, 3))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", WITH_COPIES)
def test_whole_copies_of_several_optimizers_get_values_that_are_set(name: str, mesh: str) -> None:
    runs = []
    for axes in (None, MESHES[mesh]):
        model = in_two(InTwo, name, axes)
        fitted(model)
        model.set_weights([0.5 * w for w in model.get_weights()])
        runs.append(fitted(model))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", WITH_COPIES)
def test_whole_copies_that_another_optimizer_would_not_reach_are_refused(name: str) -> None:
    model = in_two(Overlapping, name, MESHES["inner"])
    words = r"Two optimizers update one weight.*Let one optimizer.*Received: 'up/.*updated by \['"
    with pytest.raises(ValueError, match=words):
        fitted(model)


def test_without_copies_two_optimizers_update_one_weight() -> None:
    models = [Overlapping(adam()) for _ in range(2)]
    config = kdist.ParallelConfig(mesh=kdist.mesh(**MESHES["inner"]), layout_map=CUTS)
    kdist.parallelize(models[1], config)
    for model in models:
        model.compile(adam())
    for one, other in zip(*map(fitted, models), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
