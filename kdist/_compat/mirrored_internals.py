"""Every use of `tf.distribute` internals behind `kdist.api.mirrored`, in one place.

TensorFlow 2.21 has no public way to do this; `tests/api/test_mirrored.py` fails by name when
one of these moves.

- `ResourceVariable`: a variable that no strategy's scope turns into copies.
- `DistributedVariable.values` and `distribute_strategy`: the copies, one per replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

_FOR_STRATEGIES = ("colocate_with", "use_resource", "experimental_enable_variable_lifting")


@contextlib.contextmanager
def plain_variables() -> Iterator[None]:
    """Meanwhile, new variables live on the device in scope alone, whatever strategy is in scope."""

    def create(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        for name in _FOR_STRATEGIES:
            kwargs.pop(name, None)
        return ResourceVariable(**kwargs)

    with tf.init_scope(), tf.variable_creator_scope(create):
        yield


def copies(variable: Any) -> tuple[tf.Variable, ...]:
    """The copies of a mirrored variable, one per replica; none of a plain one."""
    mirrored = isinstance(variable, tf.distribute.DistributedValues)
    return tuple(variable.values) if mirrored else ()


def strategy_of(variable: Any) -> tf.distribute.Strategy | None:
    """The strategy that mirrors a variable, None for a plain one."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable.distribute_strategy
    return None
