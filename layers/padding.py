"""Ragged and sparse ids of features, with padding up to the room of an example."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from .tables import FeatureConfig

PADDING = -1


@dataclasses.dataclass(frozen=True)
class Padded:
    """Where a layer that is traced has padded something.

    Attributes:
        given: The ragged or sparse tensor.
        feature: Whose ids, or weights of ids, these are.
        padding: What it is filled up with.
        operations: The operations that do it.
    """

    given: tf.RaggedTensor | tf.SparseTensor
    feature: FeatureConfig
    padding: int
    operations: frozenset[str]

    @property
    def way(self) -> tuple[Any, int]:
        """What tells how it is padded."""
        return tuple(self.feature.input_shape[1:]), self.padding


_noted: contextvars.ContextVar[list[Padded] | None] = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting_padded() -> Iterator[list[Padded]]:
    """Notes what layers pad that are traced in this block."""
    found: list[Padded] = []
    before = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(before)


def is_composite(tensor: Any) -> bool:
    """Whether a tensor is ragged or sparse."""
    return isinstance(tensor, tf.SparseTensor | tf.RaggedTensor)


def dense(feature: FeatureConfig, ids: Any, padding: int = PADDING) -> Any:
    """Ids (or their weights) of a feature, with padding up to its `input_shape`.

    Args:
        feature: The feature.
        ids: Ragged, sparse or dense ones, or lists of lists.
        padding: What they are filled up with.

    Raises:
        ValueError: An example has more of them than there is room for.
    """
    noted = _noted.get()
    if noted is None or not is_composite(ids):
        return _filled(feature, ids, padding)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    found = _filled(feature, ids, padding)
    made = frozenset(op.name for op in graph.get_operations()[before:])
    noted.append(Padded(ids, feature, padding, made))
    return found


def _filled(feature: FeatureConfig, ids: Any, padding: int) -> Any:
    if is_composite(ids) and ids.dtype.is_unsigned:  # there is none of them below 0
        ids = tf.cast(ids, "int32" if ids.dtype.size < 4 else "int64")
    if isinstance(ids, tf.SparseTensor):
        default = tf.cast(padding, ids.dtype)
        ids = tf.sparse.to_dense(tf.sparse.reorder(ids), default_value=default)
    elif isinstance(ids, list):
        ids = tf.ragged.constant(ids, dtype="int32")
    if isinstance(ids, tf.RaggedTensor):
        ids = ids.to_tensor(padding)
    ids = tf.convert_to_tensor(ids)
    room = [(have, want) for have, want in zip(ids.shape[1:], feature.input_shape[1:], strict=True)]
    if any(None not in both and both[0] > both[1] for both in room):
        raise ValueError(
            f"Feature {feature.name!r} has room for {feature.input_shape[1:]} ids in an example. "
            f"Received: {tuple(ids.shape[1:])}"
        )
    sizes = tf.shape(ids)
    missing = [
        [0, 0 if want is None else want - sizes[j + 1]]
        for j, want in enumerate(feature.input_shape[1:])
    ]
    padded = tf.pad(ids, [[0, 0], *missing], constant_values=tf.cast(padding, ids.dtype))
    return tf.ensure_shape(padded, (None, *feature.input_shape[1:]))
