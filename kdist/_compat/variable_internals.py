"""TensorFlow internals of variables: their keys, what made them, and who holds them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import tensorflow as tf

_OF_A_TRACE = "UnliftedInitializerVariable"
"""The class of variables that a `tf.function` made when it was traced; it has captured them."""
_PLAIN = ("ResourceVariable", _OF_A_TRACE)


def key_of(variable: Any) -> str:
    """The key under which Keras's optimizers know a `tf.Variable`."""
    return variable._unique_id


def give_key(value: Any, key: str) -> None:
    """Makes Keras's optimizers take a `tf.Variable`, or a tensor, for that with a key."""
    value._unique_id = key


def is_plain(variable: Any) -> bool:
    """Whether TensorFlow alone made a `tf.Variable`, in a trace or not, and no strategy of it."""
    return type(variable).__name__ in _PLAIN


def is_captured(variable: Any) -> bool:
    """Whether a traced function may read or write a plain `tf.Variable`."""
    if type(variable).__name__ == _OF_A_TRACE:
        return True
    return _holders(variable) > _holders_of_a_new_one()


@functools.cache
def _holders_of_a_new_one() -> int:
    return _holders(tf.Variable(0, trainable=False))


def _holders(variable: tf.Variable) -> int:
    """How many hold a variable's handle; one that a graph captured has more than a new one."""
    return sys.getrefcount(variable.handle)
