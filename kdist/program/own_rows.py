"""A batch that no process has whole: each reads the rows of its own replicas.

`OwnRows.cut` runs where the data is read, in every process, and keeps what its replicas take of a
global batch, as `kdist.program.batch.split` cuts it; `OwnRows.joined` makes a batch of what all of
them kept. Nothing of it is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.program.batch import SplitBatch, join, leading, row_counts, split

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
        """What a process keeps of an element: its size, and the tensors of each own replica."""

        def keep(*element: Any) -> Any:
            data = element if len(element) > 1 else element[0]
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            batch = split(x, y, sample_weight, self.count)
            parts = [keras.tree.flatten(batch.parts[r]) for r in self.replicas[process]]
            return batch.size, tuple(tuple(t for t in part if t is not None) for part in parts)

        return keep

    def joined(self, kept: Sequence[Any]) -> SplitBatch:
        """The batch whose rows the processes kept.

        Args:
            kept: Of each process, what `cut` gave there.
        """
        element = keras.utils.unpack_x_y_sample_weight(self.spec)
        there = [leaf is not None for leaf in keras.tree.flatten(element)]
        known = leading(element).shape[0]
        size = kept[0][0] if known is None else tf.constant(known, tf.int32)
        counts = row_counts(size if known is None else known, self.count)
        parts: list[Any] = [None] * self.count
        for numbers, (_, found) in zip(self.replicas, kept, strict=True):
            for r, tensors in zip(numbers, found, strict=True):
                left = iter(tensors)
                flat = [next(left) if one else None for one in there]
                parts[r] = keras.tree.pack_sequence_as(element, flat)
        full = known is not None and known >= self.count
        # Written down for what wants all rows; where nothing does, it is never computed.
        whole = _joined(parts, counts)
        return SplitBatch(whole, parts, counts, size, known, full)


def _joined(parts: list[Any], counts: list[Any]) -> Any:
    """The rows of all parts, in order; None where they have none."""
    flat = [keras.tree.flatten(part) for part in parts]
    found = [None if column[0] is None else join(list(column), counts) for column in zip(*flat)]
    return keras.tree.pack_sequence_as(parts[0], found)
