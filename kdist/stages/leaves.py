"""Data of a batch as flat lists of tensors: absent parts left out, sparse ones taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.sharded import Sharded
from kdist.dtensor.signatures import signature

import keras
import tensorflow as tf


def leaves(data: Any) -> list[tf.Tensor]:
    """The tensors of a structure; None stands for absent data and gives none."""
    flat = tf.nest.flatten(data, expand_composites=True)
    return [
        leaf if isinstance(leaf, tf.TensorSpec | Sharded) else tf.convert_to_tensor(leaf)
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


def general(parts: Sequence[Any]) -> Any:
    """What to trace with for parts of one structure, whose sizes may differ."""
    first = parts[0]
    if len({signature(leaves(part)) for part in parts}) == 1:
        return first

    def relaxed(*tensors: Any) -> Any:
        if tensors[0] is None or isinstance(tensors[0], tf.SparseTensor):
            return tensors[0]
        if isinstance(tensors[0], tf.RaggedTensor):
            specs = [tf.type_spec_from_value(one) for one in tensors]
            return specs[0].most_specific_common_supertype(specs[1:])
        shape = tensors[0].shape
        for tensor in tensors[1:]:
            shape = shape.most_specific_compatible_shape(tensor.shape)
        return tf.TensorSpec(shape, tensors[0].dtype)

    return keras.tree.map_structure(relaxed, *parts)
