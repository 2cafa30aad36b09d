"""A table whose rows are fetched, and rows of it that a step fetches for the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.storage.asked_rows import Ahead
from kdist.storage.fetched_table import FetchedTable

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class LookedUp:
    """A table whose rows are fetched.

    Attributes:
        layer: The layer that looks rows of it up.
        position: Among the trainable variables, and behind them those that programs carry.
        entry: Where it is.
        trains: Whether it is a trainable one.
        penalty: Its regularizer, if it has one.
        stage: Of the mesh, where it is looked up, if several stages do that.
        virtuals: The virtual stages there, in that case.
    """

    layer: keras.layers.Embedding
    position: int
    entry: FetchedTable
    trains: bool
    penalty: Any = None
    stage: int | None = None
    virtuals: tuple[int, ...] = ()

    def turn(self, micro_batch: int, virtual: int | None = None) -> int:
        """Which look-ups a micro-batch makes in a virtual stage; see `FetchedTable.turn`."""
        if virtual is None or len(self.virtuals) < 2:
            return micro_batch
        return micro_batch * len(self.virtuals) + self.virtuals.index(virtual)

    def slice_of(self, replica: int) -> int:
        """The slice of a replica that looks the table up."""
        slices = self.entry.topology.slices
        mine = [s for s in self.entry.placement.slices if self.stage in (None, slices[s].stage)]
        return next(s for s in mine if slices[s].index == replica)

    def rows(self, replica: int, micro_batch: int) -> Any:
        """The rows that a micro-batch looks up, on the device in scope."""
        self.entry.turn = micro_batch
        return tf.identity(self.entry.used_at((self.slice_of(replica), 0)))


RowsAhead = Sequence[tuple[LookedUp, int, Ahead]]
"""Tables, slices, and what each slice will look up."""


def corrected(ahead: RowsAhead) -> RowsAhead:
    """Rows that were fetched before an update, after it."""
    return [(t, s, t.entry.corrected(s, one) if t.trains else one) for t, s, one in ahead]


def tensors_of(ahead: RowsAhead) -> list[list[Any]]:
    """What a step hands to the next."""
    return [one.tensors for _, _, one in ahead]


def with_tensors(ahead: RowsAhead, tensors: Sequence[Sequence[Any]]) -> RowsAhead:
    """Rows of another step, whose tensors these are."""
    return [(table, s, one.of(new)) for (table, s, one), new in zip(ahead, tensors, strict=True)]
