"""Optimizers of a user's own class, which often say less of themselves than Keras's do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(24, 6)), rng.normal(size=(24, 2))


class Gain(keras.optimizers.SGD):
    """Without a `get_config` of its own."""

    def __init__(self, learning_rate: float = 0.1, gain: float = 1.0, **more: Any) -> None:
        super().__init__(learning_rate, **more)
        self.gain = gain
        self.scales = np.ones(2)
        self.function = lambda gradient: gradient

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        scaled = self.function(gradient) * self.gain * self.scales.sum()
        super().update_step(scaled, variable, learning_rate)


class Own(keras.optimizers.Optimizer):
    """Takes nothing of what Keras's optimizers take."""

    def __init__(self, rate: float) -> None:
        super().__init__(learning_rate=rate, name="own")


class Bounded(keras.optimizers.SGD):
    """Bounds gradients one by one, where Keras's step hands them over."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        bounded = [(keras.ops.clip(g, -0.05, 0.05), v) for g, v in grads_and_vars]
        return super().apply_gradients(bounded)


class Shortened(keras.optimizers.SGD):
    """Shortens all gradients together."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(g)) for g in grads))
        super().apply([0.1 * g / norm for g in grads], trainable_variables)


def made(data: int | None, level: int = 0, **more: Any) -> keras.Model:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh", name="a"), keras.layers.Dense(2, name="b")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    if data is None:
        return model
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0, **more)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=data), layout_map={}, optimizer=optimizer)
    return kdist.parallelize(model, config)


def check_equal(model: keras.Model, make: Callable[[], keras.optimizers.Optimizer]) -> None:
    """Trains the model, and a plain one, alike."""
    plain = made(None)
    losses = []
    for one in (plain, model):
        one.compile(make(), "mse")
        fit = one.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses.append(fit.history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def configured() -> Gain:
    optimizer = Gain(0.05, gain=3.0)
    optimizer.scales = np.array([1.0, 2.0])
    optimizer.function = lambda gradient: gradient * 0.5
    return optimizer


@pytest.mark.parametrize("level", [0, 1, 3])
def test_settings_that_its_config_leaves_out(level: int) -> None:
    check_equal(made(2, level), configured)


@pytest.mark.parametrize("level", [0, 3])
def test_what_it_does_to_each_gradient_is_done(level: int) -> None:
    with pytest.warns(UserWarning, match=r"'Bounded' overrides apply_gradients: .*state_on='host'"):
        check_equal(made(2, level), lambda: Bounded(0.5))


def test_what_it_does_to_all_gradients_is_done_in_one_place() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*overrides apply")
        check_equal(made(2, state_on="host"), lambda: Shortened(0.5))


def test_all_gradients_are_not_seen_on_each_device() -> None:
    model = made(2)
    model.compile(Shortened(0.5), "mse")
    with pytest.warns(UserWarning, match=r"'Shortened' overrides apply: each of 2 devices"):
        model.train_on_batch(X, Y)


def test_verify_compares_with_the_same_settings() -> None:
    model = made(2)
    model.compile(configured(), "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    report = kdist.verify(model, X[:8], Y[:8])
    assert report.ok, report


def test_one_that_cannot_be_made_again_is_refused() -> None:
    model = made(2)
    model.compile(Own(0.1), "mse")
    with pytest.raises(ValueError, match=r"from_config.*Received: Own, with config"):
        model.fit(X, Y, batch_size=8, verbose=0)
