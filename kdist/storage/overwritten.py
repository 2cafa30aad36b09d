"""Variables that their gradients overwrite: the largest values that training in float8 keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def overwritten(variables: Sequence[keras.Variable]) -> frozenset[int]:
    """Positions of those whose gradient is their new value: no sum, and not scaled as the loss."""
    return frozenset(i for i, v in enumerate(variables) if v.overwrite_with_gradient)


def refuse_added(variable: keras.Variable, gradient: Any) -> None:
    """Refuses a new value that calls of a layer, or uses in several stages, have added up.

    Args:
        variable: Any variable.
        gradient: What a tape found for it.

    Raises:
        ValueError: It is overwritten by a sum.
    """
    if not variable.overwrite_with_gradient or tf.executing_eagerly():
        return
    if isinstance(gradient, tf.Tensor) and gradient.op.type == "AddN":
        raise added_up(variable)


def added_up(variable: keras.Variable) -> ValueError:
    """What is wrong with a layer in float8 that is called several times."""
    return ValueError(
        "A layer that trains in float8 is called once in a step: what overwrites its variables "
        "would be added up, with which plain Keras doubles its scales in each step. Use a layer "
        "for each call, or another dtype policy for this one, such as 'mixed_bfloat16'. "
        f"Received: variable={variable.path!r}, with a new value from several calls"
    )
