"""Embedding gradients stay rows: what is looked up is what travels, not the whole table.

That is so of gradients, and of new values where the optimizer changes no other rows (see
`kdist.optimizer.local.changes_rows_only`); otherwise its owner sends the table whole.

A single device hands its optimizer one row per look-up. Keras's optimizers square and clip those
rows one by one, duplicates included, so to equal a single device the optimizer must get the same
rows: the replicas' rows one after the other where the look-up depends on the batch, and summed,
row by row, where every replica looks up the same (positions).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.display.warn import warn
from kdist.layers.lazy import SummedRows, rows_summed
from kdist.sharding.placement import Index
from kdist.storage.constant_ids import for_each_row
from kdist.storage.constants import constant_value
from kdist.storage.fetched_table import is_fetched

import keras
import numpy as np
import tensorflow as tf

SHAPE_ONLY = frozenset({"Shape", "ShapeN", "Size", "Rank"})
"""Operations that look at a tensor's shape and not at its values."""


@dataclasses.dataclass(frozen=True)
class LookUp:
    """How the rows of replicas make up the rows of one device.

    Attributes:
        by_batch: The look-ups depend on the batch; else all replicas look up the same.
        merged: Look-ups of the same row were merged before they were made
            (`embedding_lookup_sparse`, sparse inputs), so the whole batch's are to be merged too.
        index_bytes: Bytes of an index.
        users: How many virtual stages look up, of a pipeline.
        same: Where some rows depend on the batch, how many others, at the end, all replicas look up
            alike: stages, and how many there.
    """

    by_batch: bool = True
    merged: bool = False
    index_bytes: int = 4
    users: int = 1
    same: tuple[tuple[int, int], ...] = ()

    def beside(self, other: LookUp) -> LookUp:
        """How the rows of another virtual stage and these are looked up."""
        same = dict(self.same)
        for stage, size in other.same:
            same[stage] = same.get(stage, 0) + size
        return LookUp(same=tuple(same.items()))

    def pieces(self, gradient: Any, stage: int) -> list[tuple[Any, LookUp]]:
        """What of a replica's gradient is to be joined by itself, and how.

        Args:
            gradient: The gradient.
            stage: Where it was computed.
        """
        size = dict(self.same).get(stage, 0)
        of_batch = dataclasses.replace(self, same=())
        of_both = self.by_batch and size and is_sparse(gradient)
        if not of_both or isinstance(gradient, SummedRows):
            return [(gradient, of_batch)]
        alike = dataclasses.replace(of_batch, by_batch=False)
        values, indices, shape = gradient.values, gradient.indices, gradient.dense_shape
        return [
            (tf.IndexedSlices(values[:-size], indices[:-size], shape), of_batch),
            (tf.IndexedSlices(values[-size:], indices[-size:], shape), alike),
        ]


ONE_ROW = (
    "Constant ids are looked up where a replica or micro-batch has one row of the batch. kdist "
    "takes them as looked up once for all rows. If they are for each row, as in ops.full((rows, "
    "1), first), an Adam or Adagrad sees fewer look-ups than on one device: give each replica or "
    "micro-batch two rows. Received: ids={}"
)
"""What is said where it cannot be told which of two things a model does."""

PASSED_ON = frozenset({"Cast", "Identity", "Reshape", "ConcatV2", "StopGradient"})
"""Operations behind which indices still are the ones that a `Unique` gave."""


def look_up(indices: Any, sources: Sequence[Any]) -> LookUp:
    """Reads from a traced graph how a gradient's indices came about."""
    return LookUp(depends_on(indices, sources), _is_merged(indices), indices.dtype.size)


def arranged(gradient: tf.IndexedSlices, sources: Sequence[Any]) -> tuple[Any, LookUp]:
    """A gradient with the rows at its end that every replica looks up alike, and how it came about.

    Args:
        gradient: Of a table in a graph: the rows of each of its look-ups.
        sources: What the batch gives.
    """
    found = look_up(gradient.indices, sources)
    values, indices = _joined_from(gradient.values), _joined_from(gradient.indices)
    if not found.by_batch or found.merged or len(values) != len(indices):
        return gradient, found
    alike = [not depends_on(t, sources) for t in indices]
    sizes = [t.shape[0] for t, same in zip(indices, alike) if same]
    if not sizes or None in sizes:
        return gradient, found
    order = sorted(range(len(alike)), key=alike.__getitem__)
    rows = [tf.concat([parts[i] for i in order], 0) for parts in (values, indices)]
    arranged = tf.IndexedSlices(*rows, gradient.dense_shape)
    return arranged, dataclasses.replace(found, same=((0, sum(sizes)),))


def _joined_from(tensor: Any) -> list[Any]:
    """What was put together to a tensor, in its first dim; itself, if nothing was."""
    if not hasattr(tensor, "graph") or tensor.op.type != "ConcatV2":
        return [tensor]
    return [one for part in tensor.op.inputs[:-1] for one in _joined_from(part)]


def _is_merged(tensor: Any) -> bool:
    while hasattr(tensor, "graph") and tensor.op.type in PASSED_ON and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return hasattr(tensor, "graph") and tensor.op.type == "Unique"


def is_sparse(gradient: Any) -> bool:
    """True for a gradient made of rows."""
    return isinstance(gradient, tf.IndexedSlices)


def depends_on(tensor: Any, sources: Sequence[Any], gradients: bool = True) -> bool:
    """Whether indices of a graph follow from any of `sources`: from its values, or its rows.

    Indices that are made for each row (`ops.full((rows, 1), first)`) are constants where the number
    of rows is known, and look like those of positions. They are a source's if there are as many
    rows of them, more than one, and all are alike; of one row, if they are for each row in a trace
    on more (`kdist.storage.constant_ids`).

    Eager tensors do not know where they come from: then the answer is True.

    Args:
        tensor: The indices.
        sources: Tensors of the same graph.
        gradients: Whether gradients are told apart by it, so that a wrong answer matters.
    """
    if not hasattr(tensor, "graph"):
        return True
    return _follows_from(tensor, sources) or _is_for_each_row(tensor, sources, gradients)


def _follows_from(tensor: Any, sources: Sequence[Any]) -> bool:
    """Whether a tensor of a graph is computed from the values of any of `sources`."""
    wanted = {id(s) for s in sources}
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        current = waiting.pop()
        if id(current) in wanted:
            return True
        if id(current) in seen:
            continue
        seen.add(id(current))
        if current.op.type not in SHAPE_ONLY:
            waiting.extend(current.op.inputs)
    return False


def _is_for_each_row(tensor: Any, sources: Sequence[Any], gradients: bool) -> bool:
    """Whether constant indices are the same for each row of any of `sources`."""
    parts = _joined_from(tensor)
    if len(parts) > 1:
        return any(_is_for_each_row(one, sources, gradients) for one in parts)
    while tensor.op.type in PASSED_ON and tensor.shape.rank == 1:
        tensor = tensor.op.inputs[0]
    rows = tensor.shape[0] if tensor.shape.rank else 0
    counts = [one.shape[0] for one in sources if one.shape.rank]
    if rows not in counts:
        return False
    if rows is None:
        return _counts_rows(tensor)
    value = constant_value(tensor)
    if value is None or rows != 1:
        return value is not None and bool(np.all(value == value[:1]))
    known = for_each_row(value)
    if gradients and known is None and np.ptp(value) == 0:
        warn(ONE_ROW.format(value.tolist()))
    return bool(known)


def _counts_rows(tensor: Any) -> bool:
    """Whether a tensor of a graph follows from the size of a tensor's dim 0, not of another dim."""
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        op = waiting.pop().op
        if op.type == "StridedSlice" and op.inputs[0].op.type == "Shape":
            begin = constant_value(op.inputs[1])
            if begin is None or not np.any(begin):
                return True
        elif op.type in SHAPE_ONLY:
            return True
        elif id(op) not in seen:
            seen.add(id(op))
            waiting.extend(op.inputs)
    return False


def add(
    parts: Sequence[tf.IndexedSlices], by_batch: bool, merged: bool = False
) -> tf.IndexedSlices:
    """Joins the replicas' rows.

    Args:
        parts: One per replica.
        by_batch: See `LookUp`.
        merged: See `LookUp`.
    """
    if len(parts) == 1:
        return parts[0]
    shape = parts[0].dense_shape
    if by_batch:
        values = tf.concat([p.values for p in parts], 0)
        indices = tf.concat([p.indices for p in parts], 0)
        rows = tf.IndexedSlices(values, indices, shape)
        return rows_summed(rows) if merged else rows
    return tf.IndexedSlices(tf.add_n([p.values for p in parts]), parts[0].indices, shape)


def restrict(gradient: tf.IndexedSlices, index: Index, shape: Sequence[int]) -> tf.IndexedSlices:
    """The part of a gradient that falls on a part of its table.

    Args:
        gradient: Rows of the whole table, (n, *columns).
        index: The part, relative to the whole.
        shape: Shape of the whole table.

    Returns:
        Rows of the part, with indices relative to it.
    """
    values, indices = gradient.values, gradient.indices
    rows, columns = index[0], index[1:]
    if (rows.start, rows.stop) != (0, shape[0]):
        # Few operations: at level 3 there are as many cuts of a table as replicas squared.
        indices -= rows.start
        inside = tf.where((indices >= 0) & (indices < rows.stop - rows.start))
        values, indices = (tf.raw_ops.GatherNd(params=t, indices=inside) for t in (values, indices))
    if any((c.start, c.stop) != (0, n) for c, n in zip(columns, shape[1:])):
        values = values[(slice(None), *columns)]
    part = [i.stop - i.start for i in index]
    return tf.IndexedSlices(values, indices, tf.constant(part, indices.dtype))


def in_order(gradients: Sequence[tuple[Any, LookUp]], stage: int) -> list[Any]:
    """The pieces of gradients of one stage's virtual stages, those last that are alike."""
    pieces = [piece for gradient, how in gradients for piece in how.pieces(gradient, stage)]
    if not all(is_sparse(gradient) for gradient, _ in pieces):
        return [gradient for gradient, _ in gradients]
    return [gradient for gradient, how in sorted(pieces, key=lambda one: not one[1].by_batch)]


def joined(gradients: Sequence[Any]) -> Any:
    """Sum of the gradients of a parameter that was fetched more than once; None without any."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    if all(isinstance(g, tf.IndexedSlices) for g in gradients):
        values = tf.concat([g.values for g in gradients], 0)
        indices = tf.concat([g.indices for g in gradients], 0)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(g) for g in gradients])


def looked_up(model: keras.Model) -> list[keras.Variable]:
    """The tables of a model's embeddings."""
    layers = keras_models.flat_layers(model)
    tables = [one for one in layers if isinstance(one, keras.layers.Embedding)]
    return [v for table in tables for v in table.trainable_variables]


def gradients_of_rows(model: keras.Model) -> list[keras.Variable]:
    """The tables whose gradients are rows, as far as layers tell before a step is traced.

    The gradient of a table that is regularized, or is the head's kernel too, is dense: one on the
    host gets rows even so, and adds those of its penalty.
    """
    layers = keras_models.flat_layers(model)
    built = [one for one in layers if isinstance(one, keras.layers.Embedding) and one.built]
    return [
        table
        for table in map(_read_by_rows, built)
        if table is not None
        and table.trainable
        and (table.regularizer is None or is_fetched(table))
    ]


def _read_by_rows(layer: keras.layers.Embedding) -> keras.Variable | None:
    """The floating variable of which a layer reads rows alone, if there is one.

    With factors of LoRA, it adds these up to a table for each call, but those of a quantized
    table, which has no gradient itself: of them the rows of the first one are looked up.
    """
    if layer.quantization_mode is not None:
        return layer.lora_embeddings_a if layer.lora_enabled else None
    return None if layer.lora_enabled or getattr(layer, "tie_weights", False) else layer.embeddings
