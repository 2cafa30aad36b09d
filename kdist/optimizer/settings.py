"""What a user's optimizer is told beside what its configuration mentions."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from kdist._compat import keras_optimizers

import keras
import numpy as np
import tensorflow as tf


def carry_settings(copy: Any, optimizer: Any, left: Container[str] = ()) -> None:
    """Gives a copy the plain attributes that a user's `get_config` does not mention.

    Args:
        copy: Made by `from_config`.
        optimizer: What it is a copy of.
        left: Names of attributes that are to differ.
    """
    for name, value in _own_attributes(optimizer):
        if name not in left and _is_setting(value, optimizer):
            setattr(copy, name, value)
        elif isinstance(value, tf.Variable) and isinstance(getattr(copy, name, None), tf.Variable):
            getattr(copy, name).assign(value)


def share_variables(copy: Any, optimizer: Any) -> None:
    """Lets a copy read each `tf.Variable` that is a setting of the user's, whatever is assigned."""
    for name, value in _own_attributes(optimizer):
        if isinstance(value, tf.Variable):
            setattr(copy, name, value)


def for_all_weights(optimizer: Any) -> list[str]:
    """Attributes of a user's class in which weights can meet: scalar state, and lists by weight."""
    weights = len(keras_optimizers.updated_by(optimizer))
    found = []
    for name, value in _own_attributes(optimizer):
        if isinstance(value, keras.Variable | tf.Variable):
            found.append(name)
        elif isinstance(value, list | tuple | np.ndarray) and _is_setting(value, optimizer):
            found += [name] * (len(value) == weights > 2)  # two may be anything
    return found


def _own_attributes(optimizer: Any) -> list[tuple[str, Any]]:
    """Attributes of an optimizer that no class of Keras has given it, private ones too."""
    theirs = keras_optimizers.attributes_of_keras(optimizer)

    def own(name: str) -> bool:
        return not (name in theirs or name.startswith("_kdist") or hasattr(type(optimizer), name))

    return [(name, value) for name, value in vars(optimizer).items() if own(name)]


def _is_setting(value: Any, optimizer: Any) -> bool:
    """Whether an attribute tells how to compute: numbers, texts, arrays, functions; no state.

    An object of the user's own tells that by its attributes.
    """
    seen: set[int] = set()

    def plain(leaf: Any) -> bool:
        if isinstance(leaf, keras.Variable | tf.Variable | keras.optimizers.Optimizer):
            return False
        if callable(leaf):
            return getattr(leaf, "__self__", None) is not optimizer
        if leaf is None or isinstance(leaf, bool | int | float | str | np.ndarray | np.generic):
            return True
        if id(leaf) in seen:
            return True
        seen.add(id(leaf))
        if isinstance(leaf, set | frozenset):
            return all(map(plain, leaf))
        return hasattr(leaf, "__dict__") and all(map(plain, keras.tree.flatten(dict(vars(leaf)))))

    return all(map(plain, keras.tree.flatten(value)))
