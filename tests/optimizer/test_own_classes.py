"""Optimizers of a user's own class, which often say less of themselves than Keras's do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

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


class Options:
    """What a user's optimizer is told, in one object."""

    def __init__(self) -> None:
        self.factors = {"kernel": 1.0, "bias": 1.0}
        self.slow: set[str] = set()


class Told(keras.optimizers.SGD):
    """Keeps its settings in a private attribute, an object and a variable."""

    def __init__(self, learning_rate: float = 0.1, gain: float = 1.0, **more: Any) -> None:
        super().__init__(learning_rate, **more)
        self._gain = gain
        self.options = Options()
        self.rate = tf.Variable(1.0, dtype="float64", trainable=False)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        layer, kind = variable.name.split(":")[0].split("/")[-2:]
        scale = self._gain * self.options.factors[kind] * tf.convert_to_tensor(self.rate)
        scale = scale * 0.1 if layer in self.options.slow else scale
        super().update_step(gradient * scale, variable, learning_rate)


def told() -> Told:
    optimizer = Told(0.5, gain=0.7)
    optimizer.options.factors["kernel"] = 0.5
    optimizer.options.slow = {"b"}
    optimizer.rate.assign(0.25)
    return optimizer


@pytest.mark.parametrize("level", [0, 1, 3])
def test_settings_of_any_form_and_names_of_weights(level: int) -> None:
    model = made(2, level)
    check_equal(model, told)
    plain = made(None)
    plain.compile(told(), "mse")
    for one in (plain, model):
        one.set_weights(made(None).get_weights())
        one.optimizer.rate.assign(0.75)  # read anew by steps that are compiled
        one.train_on_batch(X, Y)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


class Numbered(keras.optimizers.SGD):
    """Has a factor for each weight, by its number."""

    def __init__(self, learning_rate: float = 0.1, **more: Any) -> None:
        super().__init__(learning_rate, **more)
        self.by_weight = [1.0, 2.0, 3.0, 4.0]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        factor = self.by_weight[self._get_variable_index(variable)]
        super().update_step(gradient * factor, variable, learning_rate)


class Summed(keras.optimizers.SGD):
    """Adds up what it has seen of all weights."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.seen = self.add_variable((), name="seen")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.seen, keras.ops.sum(gradient * gradient))
        super().update_step(gradient / (1.0 + self.seen), variable, learning_rate)


class Clipped(keras.optimizers.SGD):
    """Clips in a way of its own, all gradients together."""

    def _clip_gradients(self, grads: Any) -> Any:
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(g)) for g in grads))
        return [g / (1.0 + norm) for g in grads]


SEEING_ALL = [(Numbered, "has 'by_weight'"), (Summed, "has 'seen'"), (Clipped, "_clip_gradients")]


@pytest.mark.parametrize(("kind", "words"), SEEING_ALL)
def test_one_in_which_weights_meet_is_told_and_right_in_one_place(kind: Any, words: str) -> None:
    model = made(2)
    model.compile(kind(0.1), "mse")
    with pytest.warns(UserWarning, match=rf"'{kind.__name__}' .*{words}.*state_on='host'"):
        model.train_on_batch(X, Y)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="optimizer ")
        check_equal(made(2, state_on="host"), lambda: kind(0.1))


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


@pytest.mark.parametrize("optimizer", [configured, told])
def test_verify_compares_with_the_same_settings(optimizer: Callable) -> None:
    """A twin has variables of its own, with the same values."""
    model = made(2)
    model.compile(optimizer(), "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    report = kdist.verify(model, X[:8], Y[:8])
    assert report.ok, report


def test_one_that_cannot_be_made_again_is_refused() -> None:
    model = made(2)
    model.compile(Own(0.1), "mse")
    with pytest.raises(ValueError, match=r"from_config.*Received: Own, with config"):
        model.fit(X, Y, batch_size=8, verbose=0)
