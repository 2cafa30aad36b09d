"""Variables whose value is elsewhere from now on, and functions that would go on using them."""

from __future__ import annotations

from typing import Any

from kdist._compat import variable_internals
from kdist._compat.function_graphs import forget_traces

import tensorflow as tf

_CAPTURED: list[Any] = []
"""Handles of variables that are no longer the value, and that traced functions captured."""
_MOVES = [0]
"""How often a variable was said to be no longer the value."""


def retire(variable: Any) -> None:
    """Empties a `tf.Variable` whose value is elsewhere from now on.

    What goes on with a trace of before fails, in place of reading the last value. It takes no
    memory.
    """
    if variable_internals.is_plain(variable):
        with tf.init_scope(), tf.device(variable.device):
            nothing = tf.zeros((0,), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)


def moved(variable: Any) -> None:
    """Notes that a `tf.Variable` is not, or no longer alone, the value; see `forget_readers`."""
    _MOVES[0] += 1
    if variable_internals.is_plain(variable) and variable_internals.is_captured(variable):
        _CAPTURED.append(variable.handle)


def moves() -> int:
    """How often a value has moved: while that is the same, all are where they were."""
    return _MOVES[0]


def forget_readers() -> None:
    """Has the user's functions that read or wrote what has moved be traced anew when called.

    Of before they would read variables that are empty now, or write one copy of several.
    """
    if _CAPTURED:
        forget_traces(_CAPTURED)
        _CAPTURED.clear()
