"""Variables whose value is elsewhere from now on, and functions that would go on using them."""

from __future__ import annotations

import sys
from typing import Any

from kdist._compat.function_graphs import forget_traces

import tensorflow as tf

_CAPTURED: list[Any] = []
"""Handles of variables that are no longer the value, and that traced functions captured."""


def retire(variable: Any) -> None:
    """Empties a `tf.Variable` whose value is elsewhere from now on.

    What goes on with a trace of before fails, in place of reading the last value. It takes no
    memory.
    """
    if type(variable).__name__ == "ResourceVariable":  # not what a strategy of TensorFlow made
        with tf.init_scope(), tf.device(variable.device):
            nothing = tf.zeros((0,), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)


def moved(variable: Any) -> None:
    """Notes that a `tf.Variable` is not, or no longer alone, the value; see `forget_readers`."""
    if type(variable).__name__ == "ResourceVariable" and _holders(variable) > _holders(
        tf.Variable(0, trainable=False)
    ):
        _CAPTURED.append(variable.handle)


def _holders(variable: tf.Variable) -> int:
    """How many hold a variable's handle; one that a graph captured has more than a new one."""
    return sys.getrefcount(variable.handle)


def forget_readers() -> None:
    """Has the user's functions that read or wrote what has moved be traced anew when called.

    Of before they would read variables that are empty now, or write one copy of several.
    """
    if _CAPTURED:
        forget_traces(_CAPTURED)
        _CAPTURED.clear()
