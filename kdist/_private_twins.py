"""Keras internals for re-creating a model beside the original; see `kdist._private`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import keras
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


def loss_in(loss: keras.Loss, dtype: str) -> keras.Loss:
    """A copy of a loss object that computes in another dtype."""
    copied = copy.copy(loss)
    copied._dtype_policy = keras.dtype_policies.get(dtype)
    copied._dtype = dtype
    return copied


def compile_options(model: keras.Model) -> dict[str, Any]:
    """What `compile` was given, by argument: the objects themselves."""
    return dict(model._compile_config.config)


def not_decayed(optimizer: Any, variables: list[keras.Variable]) -> list[keras.Variable] | None:
    """Variables that `exclude_from_weight_decay` named; None if it was not called."""
    if not hasattr(optimizer, "_exclude_from_weight_decay"):
        return None
    return [v for v in variables if not optimizer._use_weight_decay(v)]


def added_losses(layer: keras.Layer) -> list[Any]:
    """What a layer itself gave to `add_loss` in its last call, activity penalties included."""
    return list(layer._get_own_losses())
