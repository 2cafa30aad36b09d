"""Tables of which slices get the rows that they look up: on the host, or split unevenly.

Where other weights are stored whole, or cut as the programs take them, a program takes of such a
table the rows of its look-ups, one after the other, as they were fetched before it runs. Each row
is sent once to a device, however often it is looked up there; gradients go back as rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.layers.lazy import SummedRows
from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.placement import Coordinate, Placement, coordinate_of
from kdist.storage.alike_rows import Asked, arranged
from kdist.storage.asked_rows import Ahead, Asking, LookUps, Wanted
from kdist.storage.variables import Stored, stored

import keras
import tensorflow as tf

ASKED, FETCHED = "asked_rows", "fetched_rows"
"""Scopes of what finds out which rows are looked up, and of what parts make of that."""

AHEAD, SENT = "rows_ahead", "sent_rows"
"""Scopes of look-ups for the next step before this one's update, and of what takes rows along."""


_any_ids = contextvars.ContextVar("any_ids", default=False)


@contextlib.contextmanager
def taking_any_ids() -> Iterator[None]:
    """Has look-ups that are traced in this block take ids of no row for some row: for stand-ins."""
    before = _any_ids.set(True)
    try:
        yield
    finally:
        _any_ids.reset(before)


class FetchedTable(Stored):
    """A table of which slices get the rows that a step looks up.

    Attributes:
        now: What is looked up in the step, or the call, that is being traced.
        combined: Whether gradients of a row that is looked up more than once are summed before they
            travel; see `kdist.optimizer.local.is_linear`.
        prefetch: Whether what the next step looks up is fetched during this one.
        turn: Which part of a step's look-ups is taken as the table now: a micro-batch's, in one
            virtual stage; None for those of all.
        by_rows: True while programs are traced, in which the table cannot be read whole.
        together: One variable with all parts, in which programs that are traced look rows up
            instead, if set: for files.
    """

    combined = by_rows = prefetch = False
    together: tf.Variable | None = None

    def __init__(self, variable: keras.Variable, placement: Placement, topology: Topology) -> None:
        super().__init__(variable, placement, topology)
        self.now = LookUps()
        self.turn: int | None = None
        self._parts = [p for p, shard in enumerate(placement.shards) if 0 not in shard.shape]

    @property
    def wanted(self) -> dict[int, Wanted]:
        """Per slice, what it looks up."""
        return self.now.wanted

    @contextlib.contextmanager
    def looking_up(self, apart: LookUps) -> Iterator[None]:
        """Meanwhile, look-ups are these."""
        self.now, before = apart, self.now
        try:
            yield
        finally:
            self.now = before

    @property
    def local_columns(self) -> int | None:
        """Columns of ids, if each part looks up its own; None if it does not."""
        split = self.placement.split
        local = split is not None and split.local_columns
        return len(self.placement.shards) if local else None

    def look_up(self, s: int, turns: Sequence[Any], asking: Asking) -> None:
        """Notes what a slice looks up.

        Args:
            s: The slice.
            turns: Of each, the indices of all look-ups of a program, in their order; (n,).
            asking: How these follow from the batch.
        """
        self.now.want(s, self._wanted(s, turns, asking))

    def _wanted(self, s: int, turns: Sequence[Any], asking: Asking) -> Wanted:
        known = [t.shape[0] for t in turns]
        split = self.placement.split
        with tf.device(self.device((s, 0))), tf.name_scope(ASKED):
            sizes = known if None not in known else [tf.size(t) for t in turns]
            indices = _joined(turns)
            unique, positions = tf.unique(indices)
            if split is not None and not self.local_columns:
                unique = self.checked(unique)
            asked = [unique] * len(self.placement.shards)
            if split is not None and split.dim == 0 and not split.masked:
                unique = tf.sort(unique)
                positions = tf.searchsorted(unique, indices)
                rows = [shard.index[0] for shard in self.placement.shards]
                ends = tf.constant([0, *(one.stop for one in rows)], unique.dtype)
                bounds = tf.searchsorted(unique, ends)
                asked = [unique[bounds[p] : bounds[p + 1]] for p in range(len(rows))]
        return Wanted(indices, unique, positions, asked, sizes, asking)

    def checked(self, ids: Any) -> Any:
        """Ids, after it is sure that the table has such rows."""
        what = f"The table {self.variable.path} does not have a row that is looked up."
        return _checked(ids, slice(0, self.placement.shape[0]), what)

    def look_ahead(self, s: int, turns: Sequence[Any], asking: Asking, there: Any) -> Ahead:
        """Fetches what a slice looks up in the next step, as the rows are now; see `look_up`.

        Args:
            s: The slice.
            turns: See `look_up`.
            asking: See `look_up`.
            there: Whether there is a next step, a boolean scalar; no row is fetched otherwise.
        """
        wanted = self._wanted(s, turns, asking)
        with tf.device(self.device((s, 0))), tf.name_scope(ASKED):
            unique = wanted.unique[: tf.where(there, tf.size(wanted.unique), 0)]
        wanted = dataclasses.replace(wanted, unique=unique, asked=[unique])
        return Ahead(wanted, self._on_all(s, self._read(unique, AHEAD)))

    def take(self, s: int, ahead: Ahead) -> None:
        """Has a slice look up what was fetched ahead."""
        self.now.want(s, ahead.wanted)
        self.now.there.update(((s, k), rows) for k, rows in enumerate(ahead.rows))

    def corrected(self, s: int, ahead: Ahead) -> Ahead:
        """What was fetched before this step's update, with the rows that it has changed."""
        unique = ahead.wanted.unique
        with tf.device(self.device(self.source((s, 0), 0))), tf.name_scope(ASKED):
            touched = tf.concat([one.unique for one in self.wanted.values()], 0)
            _, numbers = tf.unique(tf.concat([touched, unique], 0))
            here, there = tf.split(numbers, [tf.size(touched), tf.size(unique)])
            # The rows of this step were numbered first.
            changed = tf.where(there <= tf.reduce_max(here))
            again = tf.gather_nd(unique, changed)
        new = self._on_all(s, self._read(again, FETCHED))
        rows = []
        for k, (old, fresh) in enumerate(zip(ahead.rows, new, strict=True)):
            with tf.device(self.device((s, k))):
                rows.append(tf.tensor_scatter_nd_update(old, changed, fresh))
        return dataclasses.replace(ahead, rows=rows)

    def _read(self, indices: Any, scope: str) -> Any:
        """Rows of a table that is in one place, there."""
        (home,) = self.placement.shards[0].holders
        with tf.device(self.device(home)), tf.name_scope(scope):
            return tf.gather(keras_trainer.tf_variable(self.locals[home]), tf.identity(indices))

    def _on_all(self, s: int, rows: Any) -> list[Any]:
        """Sends rows to all devices of a slice."""
        sent = []
        for k in range(len(self.topology.slices[s].devices)):
            with tf.device(self.device((s, k))), tf.name_scope(SENT):
                sent.append(tf.identity(rows))
        return sent

    def used_at(self, at: Coordinate) -> Any:
        """What compute takes as the table: the rows of its look-ups, one after the other."""
        wanted, split = self.wanted[at[0]], self.placement.split
        if at in self.now.there:
            return tf.gather(self.now.there[at], self._of_turn(wanted.positions, wanted.sizes))
        if self.together is not None:
            rows = self._rows_of_all_parts(at[0], self.together)
            return tf.gather(rows, self._of_turn(wanted.positions, wanted.sizes))
        sources = [self.source(at, p) for p in self._parts]
        if split is not None and split.way == "all-reduce":
            joined = tf.identity(self._reduced(at[0], sources))
        else:
            joined = self._join(at[0], sources)
        if self.local_columns:
            return self._of_turn(joined, wanted.sizes)
        return tf.gather(joined, self._of_turn(wanted.positions, wanted.sizes))

    def whole_at(self, s: int) -> Any:
        """See `used_at`."""
        return self.used_at((s, 0))

    def shape_at(self, s: int, shape_of: Callable[[Any], Any]) -> tuple[int | None, int]:
        """The shape of `used_at` for a batch whose tensors have other shapes; see `Asking`."""
        sizes = self.wanted[s].asking.sizes(shape_of)
        if self.turn is not None and len(sizes) > 1:
            sizes = [sizes[self.turn]]
        return None if None in sizes else sum(sizes), self.placement.shape[1]  # type: ignore[arg-type]

    def source(self, at: Coordinate, part: int) -> Coordinate:
        """Who gives a coordinate its rows of a part: the holder that differs in the axis alone."""
        holders, split = self.placement.shards[part].holders, self.placement.split
        if split is None:
            return holders[0]
        slices = self.topology.slices
        here, stage = slices[at[0]], slices[at[0]].stage
        wanted = {**coordinate_of(self.topology, here.index, at[1]), split.axis: part}
        return next(
            (s, k)
            for s, k in holders
            if slices[s].stage == stage
            and coordinate_of(self.topology, slices[s].index, k) == wanted
        )

    def _of_turn(self, look_ups: Any, sizes: Sequence[Any]) -> Any:
        """Of one entry a look-up, those of what is computed now."""
        number = self.turn
        if number is None or len(sizes) == 1:
            return look_ups
        start = sum(sizes[1:number], sizes[0]) if number else 0
        return look_ups[start : start + sizes[number]]

    def _join(self, s: int, sources: Sequence[Coordinate]) -> Any:
        """What the parts have of the rows that slice `s` wants, as one tensor."""
        rows = [self._rows(s, *both) for both in zip(self._parts, sources, strict=True)]
        split = self.placement.split
        if self.local_columns:
            return tf.reshape(tf.stack(rows, 1), [-1, self.placement.shape[1]])
        if len(rows) == 1:
            return rows[0]
        if split is not None and split.masked:
            return tf.add_n(rows)
        return tf.concat(rows, 0 if split is None else split.dim)

    def _rows_of_all_parts(self, s: int, together: tf.Variable) -> Any:
        """What slice `s` wants, from one variable with all parts."""
        if (s, HOST) not in self.now.sums:
            with tf.device(together.device), tf.name_scope(FETCHED):
                self.now.sums[s, HOST] = tf.gather(together, tf.identity(self.wanted[s].unique))
        return self.now.sums[s, HOST]

    def _reduced(self, s: int, sources: Sequence[Coordinate]) -> Any:
        """The same sum for all devices that ask these sources: made on the first of them."""
        if (s, sources[0]) not in self.now.sums:
            with tf.device(self.device(sources[0])), tf.name_scope(FETCHED):
                self.now.sums[s, sources[0]] = self._join(s, sources)
        return self.now.sums[s, sources[0]]

    def _rows(self, s: int, part: int, source: Coordinate) -> Any:
        """What slice `s` wants of a part, from a holder of it, on that one's device."""
        if (s, source) not in self.now.sent:
            with tf.device(self.device(source)), tf.name_scope(FETCHED):
                self.now.sent[s, source] = self._rows_here(self.wanted[s], part, source)
        return self.now.sent[s, source]

    def _rows_here(self, wanted: Wanted, part: int, source: Coordinate) -> Any:
        table, split = keras_trainer.tf_variable(self.locals[source]), self.placement.split
        rows = self.placement.shards[part].index[0]
        if self.local_columns:
            indices = _joined(wanted.asking.on(self.device(source)))
            column = tf.reshape(indices, [-1, self.local_columns])[:, part]
            what = f"Column {part} of the ids of table {self.variable.path} has ids of part {part}."
            return tf.gather(table, _checked(column, rows, what) - rows.start)
        asked = tf.identity(wanted.asked[part]) - rows.start
        if split is None or not split.masked or len(self._parts) == 1:
            return tf.gather(table, asked)
        inside = (asked >= 0) & (asked < rows.stop - rows.start)
        found = tf.gather(table, tf.where(inside, asked, 0))
        return tf.where(inside[:, tf.newaxis], found, tf.zeros([], found.dtype))

    def rows_of(self, s: int, k: int, gradient: Any) -> tf.IndexedSlices:
        """A slice's gradient of the whole table, from that of `used_at` on its device `k`."""
        one = self.wanted[s]
        shape = tf.constant(self.placement.shape, one.indices.dtype)
        if not self.combined or self.now.of_call:
            with tf.device(self.device((s, k))):
                return tf.IndexedSlices(*self._arranged(s, gradient), shape)
        with tf.device(self.device((s, k))):
            size = tf.size(one.unique)
            values = tf.math.unsorted_segment_sum(gradient, one.positions, size)
        return SummedRows(values, one.unique, shape)

    def note_asked(self, stage: int, number: int, asked: Sequence[Asked]) -> None:
        """Notes the look-ups of a program, in their order.

        Args:
            stage: Where it runs.
            number: Of the virtual stage, among those there that look up.
            asked: What it looks up, for a batch of some size.
        """
        sizes = [one.size for one in asked]
        total = None if None in sizes else sum(n or 0 for n in sizes)
        self.now.asked.setdefault((stage, number), {})[total] = asked

    def _arranged(self, s: int, gradient: Any) -> tuple[Any, Any]:
        """A gradient and its indices: what is the same in each batch at the end, and once."""
        one, stage = self.wanted[s], self.topology.slices[s].stage
        known = [by_size for (at, _), by_size in sorted(self.now.asked.items()) if at == stage]
        if not any(n.same for by_size in known for asked in by_size.values() for n in asked):
            return gradient, one.indices
        return arranged(gradient, one.indices, one.sizes, known)

    def read_whole(self) -> ValueError:
        """What is wrong with a program that reads the table itself."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        where = graph.get_name_scope() if graph is not None else ""
        what = "split by hand" if self.placement.split else "on the host"
        return ValueError(
            f"A table {what} is used row by row, by look-ups of its layer: super().call(ids), "
            "where the layer has a call of its own. Look rows up so, and do not use the table a "
            "second time, or leave it whole on the device, without kdist.place or manual_split, "
            "and with placement='device' in a TableConfig. "
            f"Received: table {self.variable.path!r}, read whole in {where or 'the model'!r}"
        )


def is_fetched(variable: keras.Variable) -> bool:
    """Whether a variable is such a table."""
    return isinstance(stored(variable), FetchedTable)


def _joined(turns: Sequence[Any]) -> Any:
    return turns[0] if len(turns) == 1 else tf.concat(turns, 0)


def _checked(ids: Any, rows: slice, what: str) -> Any:
    """The ids, after it is sure that there are such rows.

    Args:
        ids: Any number, (n,).
        rows: What they may be.
        what: What is wrong otherwise.
    """
    if _any_ids.get():
        return tf.clip_by_value(ids, rows.start, rows.stop - 1)
    outside = (ids < rows.start) | (ids >= rows.stop)
    message = f"{what} These ids are {rows.start} to {rows.stop - 1}. Received:"
    check = tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(outside)), [message, tf.boolean_mask(ids, outside)]
    )
    keras_trainer.run_independently(check)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(ids)
