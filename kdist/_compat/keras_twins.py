"""Keras internals for re-creating a model beside the original."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from kdist._compat import keras_optimizers

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.saving import serialization_lib

_NAME_COUNTERS = "object_name_uids"


@contextlib.contextmanager
def own_lambdas() -> Iterator[None]:
    """Lets configurations hold lambdas: they are of this process's own model, not from a file."""
    with serialization_lib.SafeModeScope(False):
        yield


@contextlib.contextmanager
def names_kept() -> Iterator[None]:
    """Meanwhile, automatic names of layers count from the start; then as if nothing was made."""
    before = global_state.get_global_attribute(_NAME_COUNTERS)
    global_state.set_global_attribute(_NAME_COUNTERS, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAME_COUNTERS, before)


def take_order(layer: keras.Layer, model: keras.Layer) -> None:
    """Puts the variables of a layer, by name, in the order of another one like it.

    A layer that was quantized after it was built made them in another order than one that is built
    from its configuration.
    """
    for own in ("_trainable_variables", "_non_trainable_variables"):
        variables = getattr(layer, own)
        names = [v.name for v in getattr(model, own)]
        if len(set(names)) == len(names) and {v.name for v in variables} == set(names):
            variables.sort(key=lambda v: names.index(v.name))


def loss_in(loss: keras.Loss, dtype: str) -> keras.Loss:
    """A copy of a loss object that computes in another dtype.

    `copy.copy` would make it again from its configuration, which a user's own class may not have.
    """
    copied = object.__new__(type(loss))
    vars(copied).update(vars(loss))
    copied._dtype_policy = keras.dtype_policies.get(dtype)
    copied._dtype = dtype
    return copied


def compile_options(model: keras.Model) -> dict[str, Any]:
    """What `compile` was given, by argument: the objects themselves."""
    return dict(model._compile_config.config)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The weights that a layer has itself, and not layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def made_to_train(model: keras.Model) -> list[keras.Variable]:
    """The weights that layers made to train, frozen since or not: no statistics, no seeds."""
    return [v for layer in model._flatten_layers() for v in layer._trainable_variables]


_LATER = {
    *("built", "_input_spec", "_build_shapes_dict"),
    *("history", "_epoch_iterator", "_eval_epoch_iterator"),
}
"""Attributes that Keras gives a model when it is built, or trains."""


@functools.cache
def _of_keras() -> frozenset[str]:
    """Attributes that Keras itself gives a compiled model."""
    model = keras.Model()
    model.compile("sgd", "mse", metrics=["mae"])
    return frozenset(vars(model))


def own_attributes(layer: keras.Layer) -> dict[str, Any]:
    """What the author of a layer, or a model, keeps on it, in the order in which it came."""
    known = _of_keras() | _LATER
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in known and not name.startswith("_kdist") and not _is_of_kdist(value)
    }


def _is_of_kdist(value: Any) -> bool:
    """Whether it is a method that kdist has put on a model."""
    owner = getattr(value, "__self__", None)
    return isinstance(value, types.MethodType) and type(owner).__module__.startswith("kdist.")


def not_decayed(optimizer: Any, variables: list[keras.Variable]) -> list[keras.Variable] | None:
    """Variables that `exclude_from_weight_decay` named; None if it was not called."""
    if not hasattr(optimizer, "_exclude_from_weight_decay"):
        return None
    return [v for v in variables if not keras_optimizers.decays(optimizer, v)]


@contextlib.contextmanager
def equal_draws() -> Iterator[None]:
    """Meanwhile, normal and uniform random numbers are one number, and seeds stay as they are.

    How many are drawn, how often and by which seed, makes no difference then. What is random in
    another way stays so.
    """

    def normal(
        shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        return drawn(shape, mean, stddev, dtype)

    def uniform(
        shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        return drawn(shape, minval, maxval - minval, dtype)

    def drawn(shape: Any, start: Any, scale: Any, dtype: Any) -> Any:
        dtype = dtype or keras.config.floatx()
        start, scale = tf.cast(start, dtype), tf.cast(scale, dtype)
        return tf.zeros(shape, dtype) + (start + scale * tf.constant(0.6, dtype))

    module = keras_backend.random
    own = {"normal": normal, "truncated_normal": normal, "uniform": uniform}
    before = {name: getattr(module, name) for name in own}
    for name, function in own.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def added_losses(layer: keras.Layer) -> list[Any]:
    """What a layer itself gave to `add_loss` in its last call, activity penalties included."""
    return list(layer._get_own_losses())
