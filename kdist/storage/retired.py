"""Variables whose value is elsewhere from now on, and functions that would go on using them."""

from __future__ import annotations

import functools
import sys
from typing import Any

from kdist._compat.function_graphs import forget_traces

import tensorflow as tf

_OF_A_TRACE = "UnliftedInitializerVariable"
"""The class of variables that a `tf.function` made when it was traced; it has captured them."""
_PLAIN = ("ResourceVariable", _OF_A_TRACE)  # not what a strategy of TensorFlow made
_CAPTURED: list[Any] = []
"""Handles of variables that are no longer the value, and that traced functions captured."""
_MOVES = [0]
"""How often a variable was said to be no longer the value."""


def retire(variable: Any) -> None:
    """Empties a `tf.Variable` whose value is elsewhere from now on.

    What goes on with a trace of before fails, in place of reading the last value. It takes no
    memory.
    """
    if type(variable).__name__ in _PLAIN:
        with tf.init_scope(), tf.device(variable.device):
            nothing = tf.zeros((0,), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)


def moved(variable: Any) -> None:
    """Notes that a `tf.Variable` is not, or no longer alone, the value; see `forget_readers`."""
    _MOVES[0] += 1
    kind = type(variable).__name__
    if kind in _PLAIN and (kind == _OF_A_TRACE or _holders(variable) > _holders_of_a_new_one()):
        _CAPTURED.append(variable.handle)


def moves() -> int:
    """How often a value has moved: while that is the same, all are where they were."""
    return _MOVES[0]


@functools.cache
def _holders_of_a_new_one() -> int:
    return _holders(tf.Variable(0, trainable=False))


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
