"""Keras internals of an optimizer's learning rate."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def adopt_learning_rate(optimizer: Any, source: Any) -> None:
    """Makes `optimizer` read the learning rate (variable or schedule) of `source`."""
    object.__setattr__(optimizer, "_learning_rate", source._learning_rate)


class LearningRate:
    """The learning rate of an optimizer as of now; a schedule is a function of its own.

    Keras computes schedules in float32, and TensorFlow rounds them otherwise in a graph that it
    optimizes (a division by a constant is a product there). As a node of its own a schedule is
    optimized whatever is done with the graph around it, and gives what it gives a plain model.

    Args:
        optimizer: A Keras optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._functions: Any = weakref.WeakKeyDictionary()

    def __call__(self) -> Any:
        """A tensor; None where the rate is neither a variable nor a schedule."""
        rate, step = self._optimizer._learning_rate, self._optimizer._iterations
        if isinstance(rate, keras.Variable):
            return tf.identity(rate.value)
        if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
        if tf.executing_eagerly():
            return rate(step)
        # Once for each graph: what a schedule reads in Python is read where Keras would.
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._functions:
            alone = {"_noinline": True}
            call = tf.function(rate, autograph=False, experimental_attributes=alone)
            self._functions[graph] = call
        return self._functions[graph](tf.identity(step.value))


@contextlib.contextmanager
def fixed_learning_rate(optimizer: Any, rate: Any) -> Iterator[None]:
    """Meanwhile, an optimizer has a learning rate; its own, if that is None."""
    if rate is None:
        yield
        return
    shared = optimizer._learning_rate
    object.__setattr__(optimizer, "_learning_rate", lambda: rate)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_learning_rate", shared)


def is_rate_of(optimizer: Any, variable: keras.Variable) -> bool:
    """Whether a variable is an optimizer's learning rate."""
    return variable is optimizer._learning_rate


def config_without_rate(optimizer: Any) -> dict[str, Any]:
    """An optimizer's configuration with a rate of 0: configs cannot express every schedule."""
    shared = optimizer._learning_rate
    object.__setattr__(optimizer, "_learning_rate", keras.Variable(0.0, name="learning_rate"))
    try:
        return optimizer.get_config()
    finally:
        object.__setattr__(optimizer, "_learning_rate", shared)
