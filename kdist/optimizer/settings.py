"""What a user's optimizer is told beside what its configuration mentions."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

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
    for name, value in vars(optimizer).items():
        own = name.startswith("_") or name == "built" or hasattr(type(optimizer), name)
        if not own and name not in left and _is_setting(value, optimizer):
            setattr(copy, name, value)


def _is_setting(value: Any, optimizer: Any) -> bool:
    """Whether an attribute tells how to compute: numbers, texts, arrays, functions; no state."""

    def plain(leaf: Any) -> bool:
        if isinstance(leaf, keras.Variable | tf.Variable | keras.optimizers.Optimizer):
            return False
        if callable(leaf):
            return getattr(leaf, "__self__", None) is not optimizer
        return leaf is None or isinstance(leaf, bool | int | float | str | np.ndarray | np.generic)

    return all(map(plain, keras.tree.flatten(value)))
