"""What traces and programs are kept by: structure, shapes and dtypes of what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def signature(data: Any) -> tuple:
    """Hashable shapes and dtypes of a structure of tensors."""
    leaves = tf.nest.flatten(data)
    return tuple(None if t is None else (tuple(t.shape), t.dtype.name) for t in leaves)


def apart_from_rows(key: Sequence[Any]) -> tuple[int | None, tuple]:
    """Rows of a batch, None if they are not known, and the rest of a `signature` of data."""
    known = [one for one in key if one is not None and one[0]]
    rows = known[0][0][0] if known else None
    rest = tuple(one if one is None or not one[0] else (one[0][1:], one[1]) for one in key)
    return rows, rest


def tensor_spec(tensor: Any) -> Any:
    """Spec of a tensor; None stays None."""
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def structure(data: Any) -> str:
    """Tells apart structures, and where in them None is, that flat tensors do not tell."""
    leaves = [leaf is None for leaf in tf.nest.flatten(data)]
    return repr(tf.nest.pack_sequence_as(data, leaves))
