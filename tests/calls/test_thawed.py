"""Layers that are thawed, or frozen, between steps of one's own and within them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from .step_parts import CUTS, IDS, MESHES, Own, batch, layer_of_two, same

pytestmark = pytest.mark.usefixtures("float64")
both_meshes = pytest.mark.parametrize("axes", MESHES, ids=IDS)
levels = pytest.mark.parametrize("level", [0, 3])


def two(axes: dict[str, int], level: int, kind: type = Own) -> list[keras.Model]:
    """A model plain, and over a mesh, compiled with an optimizer built for all weights."""

    def made() -> keras.Model:
        keras.utils.set_random_seed(1)
        return layer_of_two(kind, keras.layers.Dense(8, "tanh", name="mid"))

    models = [made(), made()]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=CUTS if "model" in axes else None,
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
    )
    kdist.parallelize(models[1], config)
    for model in models:
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
    return models


def stepped(model: keras.Model, optimizer: Any) -> Callable:
    """A function that trains what is trainable when it is traced."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return kdist.function(step, model) if hasattr(model, "plan") else tf.function(step)


@pytest.mark.parametrize("compiled", [True, False])
@levels
@both_meshes
def test_a_new_function_trains_what_was_thawed(axes: Any, level: int, compiled: bool) -> None:
    """Functions of before go on with what they train, as traced ones do."""
    x, y = map(tf.constant, batch(8))
    models, losses = two(axes, level), []
    for model in models:
        optimizer = model.optimizer
        if not compiled:
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
            optimizer.build(model.trainable_variables)
        up, mid = model.get_layer("up"), model.get_layer("mid")
        up.trainable = False
        first = stepped(model, optimizer)
        found = [first(x, y)]
        up.trainable, mid.trainable = True, False
        second = stepped(model, optimizer)
        found += [second(x, y), first(x, y), first(x, y), second(x, y)]
        mid.trainable = True
        third = stepped(model, optimizer)
        found += [one(x, y) for one in (third, first, second, third)]
        assert up.trainable and mid.trainable
        losses.append([float(one) for one in found])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    same(models)


def test_compile_has_functions_train_what_trains_by_then() -> None:
    x, y = map(tf.constant, batch(8))
    _, model = two(MESHES[0], 0)
    up = model.get_layer("up")
    step = stepped(model, model.optimizer)
    step(x, y)
    up.trainable = False
    model.compile(model.optimizer, "mse")
    before = up.kernel.numpy()
    step(x, y)
    np.testing.assert_array_equal(up.kernel.numpy(), before)


@both_meshes
def test_a_step_that_freezes_within_goes_on_beside_one_that_thaws(axes: Any) -> None:
    """Its function is made anew for the thawed layer; what the user has set since stays."""
    x, y = map(tf.constant, batch(8))
    models, losses, flags = two(axes, 0), [], []
    for model in models:
        up, mid = model.get_layer("up"), model.get_layer("mid")
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)

        def toggled(x: Any, y: Any, model: Any = model, up: Any = up, optimizer: Any = optimizer):
            up.trainable = False
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((model(x, training=True) - y) ** 2)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            up.trainable = True
            return loss

        mid.trainable = False
        first = tf.function(toggled) if model is models[0] else kdist.function(toggled, model)
        found = [first(x, y)]
        up.trainable, mid.trainable = False, True
        second = stepped(model, optimizer)
        found += [second(x, y), first(x, y), second(x, y)]
        losses.append([float(one) for one in found])
        flags.append((up.trainable, mid.trainable))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    assert flags[0] == flags[1]
    same(models)


class FreezesWithin(Own):
    """Freezes a layer before its optimizer is first applied, and thaws it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        self.get_layer("up").trainable = False
        logs = super().train_step(data)
        self.get_layer("up").trainable = True
        return logs


@levels
@both_meshes
def test_what_a_step_freezes_is_not_among_what_it_updates(axes: Any, level: int) -> None:
    models = two(axes, level, FreezesWithin)
    for model in models:
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    same(models)


@pytest.mark.parametrize("kind", [Own, keras.Model])
@both_meshes
def test_fit_follows_where_its_function_is_made_anew(axes: Any, kind: type) -> None:
    """Keras has its users call `make_train_function(force=True)` where they freeze or thaw."""
    models, losses = two(axes, 0, kind), []
    for model in models:
        up = model.get_layer("up")
        up.trainable = False
        model.compile(model.optimizer, "mse")

        def thaw(epoch: int, logs: Any, model: Any = model, up: Any = up) -> None:
            up.trainable = epoch == 1
            model.make_train_function(force=True)

        thaws = keras.callbacks.LambdaCallback(on_epoch_begin=thaw)
        options = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False}
        history = model.fit(*batch(), callbacks=[thaws], **options).history
        losses.append([value for values in history.values() for value in values])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    same(models)
