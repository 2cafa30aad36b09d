"""Tables of which slices get the rows that they look up: on the host, or split unevenly.

Where other weights are stored whole, or cut as the programs take them, a program takes of such a
table the rows of its look-ups, one after the other, as they were fetched before it runs. Each row
is sent once to a device, however often it is looked up there; gradients go back as rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate, Placement, coordinate_of
from kdist.storage.variables import Stored

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The rows of a table that one slice looks up in a step.

    Attributes:
        indices: Of each look-up, in the order in which the program makes them.
        unique: The same, each once; in ascending order if the table has several parts.
        positions: Of each look-up, where in `unique` it is.
        own: Of each part of the table, which of its rows these are.
        sizes: Look-ups of each micro-batch.
    """

    indices: Any
    unique: Any
    positions: Any
    own: list[Any]
    sizes: list[Any]


class FetchedTable(Stored):
    """A table of which slices get the rows that a step looks up.

    Attributes:
        wanted: Per slice, what it looks up in the step that is being traced.
        combined: Whether gradients of a row that is looked up more than once are summed before they
            travel; see `kdist.optimizer.local.is_linear`.
        micro_batch: Which micro-batch's rows are taken as the table now; None for those of all.
        by_rows: True while programs are traced, in which the table cannot be read whole.
    """

    combined = by_rows = False

    def __init__(self, variable: keras.Variable, placement: Placement, topology: Topology) -> None:
        super().__init__(variable, placement, topology)
        self.wanted: dict[int, Wanted] = {}
        self.micro_batch: int | None = None
        self._sent: dict[tuple[int, Coordinate], Any] = {}

    def look_up(self, s: int, micro_batches: Sequence[Any]) -> None:
        """Notes what a slice looks up.

        Args:
            s: The slice.
            micro_batches: Of each, the indices of all look-ups of a program, in their order; (n,).
        """
        known = [t.shape[0] for t in micro_batches]
        with tf.device(self.device((s, 0))):
            sizes = known if None not in known else [tf.size(t) for t in micro_batches]
            indices = micro_batches[0] if len(sizes) == 1 else tf.concat(micro_batches, 0)
            unique, positions = tf.unique(indices)
            own = [unique]
            if len(self.placement.shards) > 1:
                rows = [shard.index[0] for shard in self.placement.shards]
                unique = tf.sort(unique)
                positions = tf.searchsorted(unique, indices)
                ends = tf.constant([0, *(one.stop for one in rows)], unique.dtype)
                bounds = tf.searchsorted(unique, ends)
                own = [unique[bounds[p] : bounds[p + 1]] - r.start for p, r in enumerate(rows)]
        self.wanted[s] = Wanted(indices, unique, positions, own, sizes)
        self._sent = {key: rows for key, rows in self._sent.items() if key[0] != s}

    def used_at(self, at: Coordinate) -> Any:
        """What compute takes as the table: the rows of its look-ups, one after the other."""
        rows = [self._rows(at[0], p, self.source(at, p)) for p in range(len(self.placement.shards))]
        joined = rows[0] if len(rows) == 1 else tf.concat(rows, 0)
        one, number = self.wanted[at[0]], self.micro_batch
        positions = one.positions
        if number is not None and len(one.sizes) > 1:
            start = sum(one.sizes[1:number], one.sizes[0]) if number else 0
            positions = positions[start : start + one.sizes[number]]
        return tf.gather(joined, positions)

    def whole_at(self, s: int) -> Any:
        """See `used_at`."""
        return self.used_at((s, 0))

    def source(self, at: Coordinate, part: int) -> Coordinate:
        """Who gives a coordinate its rows of a part: the holder that differs in the axis alone."""
        holders, axis = self.placement.shards[part].holders, self.placement.split_axis
        if axis is None:
            return holders[0]
        slices = self.topology.slices
        here, stage = slices[at[0]], slices[at[0]].stage
        wanted = {**coordinate_of(self.topology, here.index, at[1]), axis: part}
        return next(
            (s, k)
            for s, k in holders
            if slices[s].stage == stage
            and coordinate_of(self.topology, slices[s].index, k) == wanted
        )

    def _rows(self, s: int, part: int, source: Coordinate) -> Any:
        """What slice `s` wants of a part, from a holder of it, on that one's device."""
        if (s, source) not in self._sent:
            with tf.device(self.device(source)):
                table = keras_trainer.tf_variable(self.locals[source])
                self._sent[s, source] = tf.gather(table, tf.identity(self.wanted[s].own[part]))
        return self._sent[s, source]

    def rows_of(self, s: int, k: int, gradient: Any) -> tf.IndexedSlices:
        """A slice's gradient of the whole table, from that of `used_at` on its device `k`."""
        one = self.wanted[s]
        shape = tf.constant(self.placement.shape, one.indices.dtype)
        if not self.combined:
            return tf.IndexedSlices(gradient, one.indices, shape)
        with tf.device(self.device((s, k))):
            size = tf.size(one.unique)
            values = tf.math.unsorted_segment_sum(gradient, one.positions, size)
        return tf.IndexedSlices(values, one.unique, shape)

    def read_whole(self) -> ValueError:
        """What is wrong with a program that reads the table itself."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        where = graph.get_name_scope() if graph is not None else ""
        what = "split by rows" if self.placement.split_axis else "on the host"
        return ValueError(
            f"A table {what} is used row by row, by look-ups of its layer. Leave it whole on the "
            "device, without kdist.place or manual_split, or do not use it a second time. "
            f"Received: table {self.variable.path!r}, read whole in {where or 'the model'!r}"
        )
