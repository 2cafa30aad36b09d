"""Splitting a global batch over the replicas, and joining what they return.

Every replica gets a contiguous run of rows; sizes differ by at most one, the first replicas taking
the extra rows. A batch smaller than the replica count leaves some replicas without rows: they get
a copy of the last row as a stand-in, and a count of 0, so that shapes stay legal while nothing
they compute counts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class SplitBatch:
    """A global batch cut over the replicas.

    Attributes:
        whole: The (x, y, sample_weight) that was cut.
        parts: One (x, y, sample_weight) per replica.
        counts: Rows that count, one scalar int32 tensor per replica.
        size: Rows of the global batch, scalar int32 tensor.
        static_size: The same if one device would know it while tracing, else None. A tensor in a
            step over inner axes that serves all sizes.
        full: True if it is known that every replica has rows.
    """

    whole: tuple[Any, Any, Any]
    parts: list[tuple[Any, Any, Any]]
    counts: list[tf.Tensor]
    size: tf.Tensor
    static_size: Any
    full: bool


def part_bounds(size: int, replicas: int) -> list[tuple[int, int]]:
    """Half-open row ranges of the replicas.

    >>> part_bounds(13, 8)[:6]
    [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]
    """
    quotient, extra = divmod(size, replicas)
    starts = [r * quotient + min(r, extra) for r in range(replicas + 1)]
    return list(zip(starts[:-1], starts[1:]))


def share_of(count: Any, size: Any) -> Any:
    """What share of a batch some rows are, a float64 scalar; 0 of a batch without rows.

    A constant where both are known, which TensorFlow need not find out for each device.
    """
    known = [tf.get_static_value(one) for one in (count, size)]
    if None not in known:
        return tf.constant(known[0] / known[1] if known[1] else 0.0, tf.float64)
    return tf.math.divide_no_nan(tf.cast(count, tf.float64), tf.cast(size, tf.float64))


def for_each_term(share: Any, terms: int) -> Any:
    """One share for all compiled losses, (terms,); a constant where it is known."""
    known = tf.get_static_value(share)
    return tf.fill([terms], share) if known is None else tf.constant([known] * terms, share.dtype)


def row_counts(size: Any, replicas: int) -> list[Any]:
    """How many rows each replica takes of a batch, as scalar int32 tensors.

    Args:
        size: Rows of the batch, a number or a tensor.
        replicas: How many there are.
    """
    if isinstance(size, int):
        bounds = part_bounds(size, replicas)
        return [tf.constant(end - begin, tf.int32) for begin, end in bounds]
    quotient, extra = size // replicas, size % replicas
    return [quotient + tf.cast(r < extra, tf.int32) for r in range(replicas)]


def leading(data: Any) -> Any:
    """The first tensor of a structure that is no scalar: its leading dim is the batch."""
    shaped = (leaf for leaf in keras.tree.flatten(data) if hasattr(leaf, "shape"))
    return next(leaf for leaf in shaped if tf.TensorShape(leaf.shape).rank != 0)


def refuse_sizes(data: Any) -> Any:
    """What has to run before the rows of a batch are taken: all its tensors have as many.

    Args:
        data: Structure of tensors.

    Returns:
        An assertion over sizes that are not known yet; None where all are.

    Raises:
        ValueError: A tensor is a scalar, or two have another leading dim.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    shapes = [tuple(leaf.shape) for leaf in leaves]
    known = {shape[0] for shape in shapes if shape and shape[0] is not None}
    if () in shapes or len(known) > 1:
        raise ValueError(
            "Every tensor of a batch has the batch as its first dim, which replicas share: inputs, "
            "targets and weights have as many rows. Repeat what is the same for all rows "
            "(np.repeat, tf.repeat), or make it a weight or a constant of the model. "
            f"Received: shapes {shapes}"
        )
    if len(leaves) == 1 or all(shape[0] is not None for shape in shapes):
        return None
    sizes = [_rows(leaf) for leaf in leaves]
    return tf.debugging.Assert(
        tf.reduce_all(tf.equal(tf.stack(sizes), sizes[0])),
        ["inputs, targets and weights of a batch have as many rows; received", *sizes],
    )


def _rows(leaf: Any) -> Any:
    """The leading dim of a tensor, a scalar int32 tensor."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.shape(leaf)[0]


def split(
    x: Any,
    y: Any,
    sample_weight: Any,
    replicas: int,
    static: bool = False,
    checked: bool = False,
) -> SplitBatch:
    """Cuts a global batch into one part per replica.

    Args:
        x: Structure of tensors with a common leading batch dim.
        y: The same, or None.
        sample_weight: The same, or None.
        replicas: Number of parts.
        static: Whether parts are to have a static batch size, if the batch has one, even where they
            have different ones.
        checked: Whether `refuse_sizes` has seen it.

    Returns:
        A `SplitBatch`. Otherwise parts have a static batch size only where all have the same one.

    Raises:
        ValueError: See `refuse_sizes`.
    """
    x, y, sample_weight = whole = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
    first = leading(x)
    known = first.shape[0]
    size = _rows(first) if known is None else tf.constant(known, tf.int32)
    if replicas > 1 and not checked and (before := refuse_sizes(whole)) is not None:
        with tf.control_dependencies([before]):
            size = tf.identity(size)
    if replicas == 1:
        return SplitBatch(whole, [whole], [size], size, known, True)
    if known is not None and known > 0 and known % replicas == 0:
        step = known // replicas
        bounds = [(r * step, (r + 1) * step) for r in range(replicas)]
        counts = [tf.constant(step, tf.int32)] * replicas
        parts = [_take(whole, a, b) for a, b in bounds]
        return SplitBatch(whole, parts, counts, size, known, True)
    if known is not None and (static or tf.executing_eagerly()):
        return _split_at(whole, known, replicas)
    quotient, extra = size // replicas, size % replicas
    parts, counts = [], row_counts(size, replicas)
    for r, count in enumerate(counts):
        begin = r * quotient + tf.minimum(r, extra)
        end = tf.maximum(begin + count, 1)
        parts.append(_take(whole, tf.where(count > 0, begin, end - 1), end))
    full = known is not None and known >= replicas
    return SplitBatch(whole, parts, counts, size, known, full)


def _as_tensor(leaf: Any) -> Any:
    """A NumPy array as a tensor: op by op, `train_on_batch` hands on what it was given."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _split_at(whole: Any, size: int, replicas: int) -> SplitBatch:
    """`split` of a batch of known size, at known rows."""
    bounds = part_bounds(size, replicas)
    parts = [_take(whole, a, b) if b > a else _take(whole, size - 1, size) for a, b in bounds]
    counts = [tf.constant(b - a, tf.int32) for a, b in bounds]
    return SplitBatch(whole, parts, counts, tf.constant(size), size, size >= replicas)


def _take(data: Any, begin: Any, end: Any) -> Any:
    """Rows [begin, end) of every leaf."""

    def rows(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(rest)], 0)
            extent = tf.concat([[tf.cast(end - begin, tf.int64)], rest], 0)
            return tf.sparse.slice(leaf, start, extent)
        return leaf[begin:end]

    return keras.tree.map_structure(rows, data)


def join(parts: list[Any], counts: list[tf.Tensor]) -> Any:
    """Concatenates the replicas' outputs, in order, leaving stand-in rows out."""
    if len(parts) == 1:
        return parts[0]

    def concat(*leaves: Any) -> Any:
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, [_take(leaf, 0, n) for leaf, n in zip(leaves, counts)])
        return tf.concat([leaf[:n] for leaf, n in zip(leaves, counts)], axis=0)

    return keras.tree.map_structure(concat, *parts)
