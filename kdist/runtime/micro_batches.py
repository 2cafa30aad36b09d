"""Micro-batches: each replica's part of a batch, cut again, with what each counts.

Rows are cut as they are over replicas (`kdist.program.batch`): contiguous, sizes differing by at
most one, and a stand-in row that counts for nothing where there are more micro-batches than rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.program.batch import SplitBatch, for_each_term, share_of, split
from kdist.program.loss import shares_from_counts

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A batch as micro-batches of replicas.

    Attributes:
        parts: `parts[replica][micro_batch]`: (x, y, sample_weight).
        counts: Rows that count, int32 scalars, alike.
        shares: Share of the whole batch's rows, float64 scalars, alike.
        full: True if it is known that every micro-batch has rows.
    """

    parts: list[list[tuple[Any, Any, Any]]]
    counts: list[list[tf.Tensor]]
    shares: list[list[tf.Tensor]]
    full: bool

    @classmethod
    def of(cls, batch: SplitBatch, micro_batches: int, static: bool = False) -> MicroBatches:
        """Cuts every replica's part of a batch; see `kdist.program.batch.split`."""
        parts, counts, shares = [], [], []
        full = batch.full
        for part, rows in zip(batch.parts, batch.counts):
            x, y, sample_weight = _tensors(part)
            cut = split(x, y, sample_weight, micro_batches, static, checked=True)
            # A replica without rows has one that does not count.
            used = [tf.minimum(count, rows) for count in cut.counts]
            parts.append(cut.parts)
            counts.append(used)
            shares.append([share_of(n, batch.size) for n in used])
            full = full and cut.full
        return cls(parts, counts, shares, full)

    def joined_rows(self, replica: int) -> list[tf.Tensor]:
        """Rows of each micro-batch that together are those of the replica's part of the batch.

        A replica without rows has a stand-in row there, which is its first micro-batch's.
        """
        first, *others = self.counts[replica]
        return [first if self.full else tf.maximum(first, 1), *others]

    def term_shares(self, counted: list[list[Any]] | None, terms: int) -> list[list[Any]]:
        """Each micro-batch's share of every compiled loss, float64 (terms,).

        Args:
            counted: What each micro-batch counts, (terms,), where that depends on masks or weights.
            terms: Number of compiled losses.
        """
        if counted is None:
            return [[for_each_term(share, terms) for share in row] for row in self.shares]
        flat = iter(shares_from_counts([count for row in counted for count in row]))
        return [[next(flat) for _ in row] for row in counted]


def _tensors(data: Any) -> Any:
    """Arrays of a user's own loop as tensors."""

    def convert(leaf: Any) -> Any:
        keep = leaf is None or isinstance(leaf, tf.SparseTensor | tf.RaggedTensor)
        return leaf if keep else tf.convert_to_tensor(leaf)

    return keras.tree.map_structure(convert, data)
