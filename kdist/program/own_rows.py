"""A batch that no process has whole: each reads the rows of its own replicas.

`OwnRows.cut` runs where the data is read, in every process, and keeps what its replicas take of a
global batch, as `kdist.program.batch.split` cuts it; `OwnRows.joined` makes a batch of what all of
them kept. Nothing of it is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.program.batch import (
    SplitBatch,
    join,
    leading,
    part_bounds,
    refuse_sizes,
    row_counts,
    split,
)

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """Which rows of a dataset's elements, which are global batches, are read where.

    Attributes:
        spec: Of an element of the dataset.
        replicas: For each process, in order, the numbers of its replicas.
    """

    spec: Any
    replicas: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of all replicas."""
        return sum(map(len, self.replicas))

    def cut(self, process: int) -> Callable[..., Any]:
        """What a process keeps of an element: its size, and the tensors of each own replica.

        See `kdist.program.batch.refuse_sizes` for elements that are refused.
        """

        @tf.autograph.experimental.do_not_convert  # which `map` would do, and warn where it cannot
        def keep(*element: Any) -> Any:
            data = element if len(element) > 1 else element[0]
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            batch = split(x, y, sample_weight, self.count)
            parts = [keras.tree.flatten(batch.parts[r]) for r in self.replicas[process]]
            return batch.size, tuple(tuple(t for t in part if t is not None) for part in parts)

        return keep

    def kept(self, process: int, size: Any) -> Any:
        """The numbers of the rows that `cut` keeps of a batch of a size, stand-ins too."""
        replicas, found = self.count, []
        quotient, extra = size // replicas, size % replicas
        for r in self.replicas[process]:
            begin = r * quotient + tf.minimum(r, extra)
            end = tf.maximum(begin + quotient + tf.cast(r < extra, tf.int32), 1)
            found.append(tf.range(tf.minimum(begin, end - 1), end))
        return tf.concat(found, 0)

    def in_parts(self, process: int, size: Any, flat: Sequence[Any]) -> Any:
        """What `cut` keeps of a batch, of the rows of `kept`.

        Args:
            process: Its number.
            size: Of the batch.
            flat: The rows, as a flat element of the dataset.
        """
        known = leading(self.spec).shape[0]
        if known is None:
            counts = [tf.maximum(one, 1) for one in row_counts(size, self.count)]
        else:
            counts = [max(b - a, 1) for a, b in part_bounds(known, self.count)]
        begin, parts = 0, []
        for r in self.replicas[process]:
            end = begin + counts[r]
            parts.append(tuple(one[begin:end] for one in self._in_order(flat)))
            begin = end
        return size, tuple(parts)

    def _in_order(self, flat: Sequence[Any]) -> list[Any]:
        """Tensors of an element as `cut` orders them."""
        element = tf.nest.pack_sequence_as(self.spec, flat)
        data = keras.utils.unpack_x_y_sample_weight(element)
        return [one for one in keras.tree.flatten(data) if one is not None]

    def shares(self, size: int) -> list[int]:
        """How many rows of a batch of a size each process has."""
        counts = [b - a for a, b in part_bounds(size, self.count)]
        return [sum(counts[r] for r in own) for own in self.replicas]

    def apart(self, element: tuple[Any, ...], count: int) -> Any:
        """A batch of one process alone: how many rows its replicas have, and their tensors.

        Args:
            element: Of its dataset.
            count: Of its replicas.

        Raises:
            ValueError: See `kdist.program.batch.refuse_sizes`.
        """
        data = element if len(element) > 1 else element[0]
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        before = refuse_sizes((x, y, sample_weight))
        batch = split(x, y, sample_weight, count, checked=True)
        parts = [keras.tree.flatten(part) for part in batch.parts]
        there = tuple(tuple(t for t in part if t is not None) for part in parts)
        with tf.control_dependencies([] if before is None else [before]):
            return tf.stack(batch.counts), there

    def joined_apart(self, found: Sequence[Any]) -> SplitBatch:
        """The batch of what `apart` gave in each process."""
        parts: list[Any] = [None] * self.count
        counts: list[Any] = [None] * self.count
        for numbers, (own, there) in zip(self.replicas, found, strict=True):
            for at, (r, tensors) in enumerate(zip(numbers, there, strict=True)):
                parts[r], counts[r] = self._filled(tensors), own[at]
        return SplitBatch(_joined(parts, counts), parts, counts, tf.add_n(counts), None, False)

    def _filled(self, tensors: Sequence[Any]) -> Any:
        """The (x, y, sample_weight) that tensors are all of but what is None."""
        element, left = keras.utils.unpack_x_y_sample_weight(self.spec), iter(tensors)
        flat = [None if leaf is None else next(left) for leaf in keras.tree.flatten(element)]
        return keras.tree.pack_sequence_as(element, flat)

    def shapes(self, kept: Any) -> tuple[tuple[int, ...], ...]:
        """Of the tensors of a batch.

        Args:
            kept: Of one process, what `cut` gave there, eagerly.
        """
        size, parts = kept
        return tuple((int(size), *t.shape[1:]) for t in parts[0])

    def of_shapes(self, process: int, kept: Any, shapes: Sequence[Sequence[int]]) -> Any:
        """What `cut` gave in a process, in a graph for batches of some shapes alone.

        Args:
            process: Its number.
            kept: What it kept.
            shapes: Of the tensors of a batch.
        """
        size, found = kept
        bounds, parts = part_bounds(shapes[0][0], self.count), []
        for r, tensors in zip(self.replicas[process], found, strict=True):
            rows = max(bounds[r][1] - bounds[r][0], 1)
            each = ((rows, *shape[1:]) for shape in shapes)
            parts.append(tuple(map(tf.ensure_shape, tensors, each)))
        return size, tuple(parts)

    def joined(self, kept: Sequence[Any], size: int | None = None) -> SplitBatch:
        """The batch whose rows the processes kept.

        Args:
            kept: Of each process, what `cut` gave there.
            size: Of the batch, if it is known.
        """
        known = leading(self.spec).shape[0] if size is None else size
        rows = kept[0][0] if known is None else tf.constant(known, tf.int32)
        counts = row_counts(rows if known is None else known, self.count)
        parts: list[Any] = [None] * self.count
        for numbers, (_, found) in zip(self.replicas, kept, strict=True):
            for r, tensors in zip(numbers, found, strict=True):
                parts[r] = self._filled(tensors)
        full = known is not None and known >= self.count
        # Written down for what wants all rows; where nothing does, it is never computed.
        whole = _joined(parts, counts)
        return SplitBatch(whole, parts, counts, rows, known, full)


def _joined(parts: list[Any], counts: list[Any]) -> Any:
    """The rows of all parts, in order; None where they have none."""
    flat = [keras.tree.flatten(part) for part in parts]
    found = [None if column[0] is None else join(list(column), counts) for column in zip(*flat)]
    return keras.tree.pack_sequence_as(parts[0], found)
