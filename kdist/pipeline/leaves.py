"""Data of a batch as flat lists of tensors: absent parts left out, sparse ones taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def leaves(data: Any) -> list[tf.Tensor]:
    """The tensors of a structure; None stands for absent data and gives none."""
    flat = tf.nest.flatten(data, expand_composites=True)
    return [
        leaf if isinstance(leaf, tf.TensorSpec) else tf.convert_to_tensor(leaf)
        for leaf in flat
        if leaf is not None
    ]


def rebuild(like: Any, tensors: Sequence[Any]) -> Any:
    """A structure like `like` from its `leaves`."""
    flat = tf.nest.flatten(like, expand_composites=True)
    given = iter(tensors)
    filled = [None if leaf is None else next(given) for leaf in flat]
    return tf.nest.pack_sequence_as(like, filled, expand_composites=True)


def specs(tensors: Sequence[Any]) -> list[tf.TensorSpec]:
    """What to trace with."""
    return [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


def signature(tensors: Sequence[Any]) -> tuple:
    """Tells apart what needs a trace of its own."""
    return tuple((tuple(t.shape), t.dtype.name) for t in tensors)
