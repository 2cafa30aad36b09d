"""What a `tf.GradientTape` knows weights by, wherever they lie.

A tape finds gradients by the handle of a variable. A weight that every device has whole has one; of
a weight that is cut, or stored in parts, no single variable is the whole. It gets an *anchor*: a
variable without content, whose handle stands for it. What is read of such a weight follows from its
anchor, for tapes (`kdist.storage.view_class`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist._compat.custom_gradients import read_of, watched, without_content
from kdist.storage.variables import Stored, stored

import keras
import tensorflow as tf


def anchor(entries: Sequence[Stored]) -> None:
    """Gives weights that are whole nowhere something that tapes know them by."""
    for entry in entries:
        if entry.anchor is None and len(entry.placement.shards) > 1:
            with tf.init_scope():
                variable = entry.variable
                entry.anchor = without_content(variable.shape, variable.dtype)


def handle_of(variable: keras.Variable) -> Any:
    """What tapes know a weight by; those that watch what is read watch it from now on."""
    return _known(variable).handle


def stand_in(variable: keras.Variable) -> Any:
    """A scalar that follows from a weight, for tapes: what takes it has a gradient of the weight.

    In a function of the user's TensorFlow asks a handle that an operation gives back for its shape,
    on the device of that operation; a table on the host is on another one.
    """
    known = _known(variable)
    # Of no shape that is known: the gradient has that of the weight.
    nothing = tf.compat.v1.placeholder_with_default(tf.zeros([], known.dtype), shape=None)
    return read_of(known, nothing)


def _known(variable: keras.Variable) -> tf.Variable:
    """The variable that tapes know a weight by, watched."""
    entry = stored(variable)
    assert entry is not None
    known: tf.Variable = entry.whole() if entry.anchor is None else entry.anchor
    watched(known, lasts=entry.anchor is not None)
    return known
