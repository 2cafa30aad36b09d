"""A `tf.Variable` with copies on several devices, as code outside kdist reads and writes it.

Keras's own optimizers write to the `tf.Variable` behind a weight, as a plain model does that trains
with a layer of a parallel one (the second half of a GAN, a model of features). That variable is one
of the copies: what is written to it has to reach them all. TensorFlow has no variable that does so
in one process, so an instance of a subclass shares what the copy's instance has, its `__dict__`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

COPIES = "_kdist_copies"
WRITES = (
    *("assign", "assign_add", "assign_sub"),
    *(f"scatter_{how}" for how in ("add", "div", "max", "min", "mul", "sub", "update")),
    *(f"scatter_nd_{how}" for how in ("add", "max", "min", "sub", "update")),
)
"""Methods of a `tf.Variable` that change it."""


def for_all(first: tf.Variable, copies: Sequence[tuple[str, tf.Variable]]) -> tf.Variable:
    """One of several copies, to be read; what is written to it is written to each.

    Args:
        first: One of them.
        copies: All of them, with their devices.
    """
    kind: Any = type(first)
    found: Any = object.__new__(_writes_all(kind))
    found.__dict__.update(first.__dict__)
    found.__dict__[COPIES] = tuple(copies)
    return found


@functools.cache
def _writes_all(base: Any) -> type:
    """The subclass of a class of variables whose instances write to all copies."""

    def method(name: str) -> Any:
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            for device, copy in self.__dict__[COPIES]:
                with tf.device(device):
                    getattr(copy, name)(*args, **kwargs)
            return self

        return write

    return type(base.__name__, (base,), {name: method(name) for name in WRITES})
