"""Twins of models with a `train_step` of their own, made from what these hold and were given."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .own_steps import Coder, Own, batch, model, over, over_plain


class Counting(keras.Model):
    """Counts its steps in a variable that is no weight, and learns by what it holds."""

    def __init__(self, network: keras.Model, what: str, held: Any) -> None:
        super().__init__()
        self.network, self.what, self.held = network, what, held
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.rate = tf.Variable(0.5, trainable=False)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError

    def call(self, x: Any) -> Any:
        return self.network(x)

    def train_step(self, x: Any) -> dict[str, Any]:
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True))) * HELD[self.what][1](self.held)
            loss *= tf.cast(self.count + 1, loss.dtype) * tf.cast(self.rate, loss.dtype)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.rate.assign(0.9 * self.rate)
        return {"loss": loss}


class Pair(NamedTuple):
    first: float
    second: float


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    factor: float


class Kind(enum.Enum):
    TWICE = 2.0


def times(x: float, y: float) -> float:
    return x * y


HELD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a named tuple": (Pair(2.0, 3.0), lambda held: held.second),
    "settings": (Settings(2.0), lambda held: held.factor),
    "settings with slots": (Slotted(2.0), lambda held: held.factor),
    "arguments": (argparse.Namespace(factor=2.0), lambda held: held.factor),
    "one of several": (Kind.TWICE, lambda held: held.value),
    "a part of a function": (functools.partial(times, 2.0), lambda held: held(2.0)),
    "an array": (np.full(3, 2.0), lambda held: held.sum()),
    "a schedule": (
        keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5),
        lambda held: tf.cast(held(3), tf.float64),
    ),
}


@pytest.mark.parametrize("what", HELD)
def test_a_twin_has_what_the_model_holds(what: str) -> None:
    network = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    one = over_plain("data", Counting(network, what, HELD[what][0]))
    one.compile(keras.optimizers.Adam(0.01))
    report = kdist.verify(one, batch()[0])
    assert report.ok, report
    assert int(one.count) == 0
    assert float(one.rate) == 0.5


class Exhausted(Own):
    """Its step asks a generator for more than it has, which `fit` takes for the end of the data."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": next(iter(()))}


def test_a_step_that_was_not_made_is_not_equal() -> None:
    one = over("data", model(Exhausted))
    one.compile(keras.optimizers.Adam(0.01), "mse")
    with pytest.raises(ValueError, match=r"(?s)leave verify out.*ran no step.*StopIteration"):
        kdist.verify(one, *batch())


class OwnCompile(Own):
    def compile(self, far: Any, beside: Any = None) -> None:
        super().compile(optimizer=far, loss="mse")
        self.beside = beside and (lambda x: beside(x))


class Holding(Coder):
    """Holds something of which nobody can make a second one; `get_config` is not its own."""

    def __init__(self, width: int, held: Any) -> None:
        super().__init__(width)
        self.held = held

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError


def with_default(layer: keras.Layer) -> Callable[..., Any]:
    """A function that has a layer as the default of an argument."""
    return lambda x, inside=layer: inside(x)


REFUSED = {
    "a layer for compile": (
        lambda: (model(OwnCompile), {"beside": layers.ReLU()}),
        r"OwnCompile.*takes a layer, 're_lu.*make it an attribute",
    ),
    "a layer by default": (
        lambda: (Holding(5, with_default(layers.Dense(2))), {}),
        r"Holding.*Holding\.held, a function.*get_config",
    ),
    "a closure": (
        lambda: (Holding(5, (lambda one: lambda x: one(x))(layers.Dense(2))), {}),
        r"Holding.*Holding\.held, a function.*get_config",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_made_again_is_refused(what: str) -> None:
    make, words = REFUSED[what]
    one, given = make()
    one = over_plain("data", one, verify="first_step")
    one.compile(keras.optimizers.Adam(0.01), **given)
    words = rf"(?s)twins of a model with its own `train_step`.*leave verify out.*{words}"
    with pytest.raises(ValueError, match=words):
        one.fit(*(batch()[:1] if given == {} else batch()), verbose=0)


def test_a_compile_that_nobody_saw_is_refused() -> None:
    one = model(OwnCompile)
    one.compile(keras.optimizers.Adam(0.01))
    one = over_plain("data", one)
    with pytest.raises(ValueError, match=r"(?s)leave verify out.*not known: compile it again"):
        kdist.verify(one, *batch())
    one.compile(keras.optimizers.Adam(0.01))
    assert kdist.verify(one, *batch()).ok
