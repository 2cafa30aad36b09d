"""What the slices computed, as the update asks for it: a unit's part, summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.optimizer.gradients import REDUCE
from kdist.optimizer.routed import summed
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import (
    Coordinate,
    Index,
    Placement,
    covers,
    relative,
    shape_of,
)
from kdist.storage import sparse
from kdist.storage.fetched_table import FetchedTable
from kdist.storage.overwritten import added_up
from kdist.storage.parts import InParts, assemble, distinct_parts, whole_of
from kdist.storage.transfer import added, largest
from kdist.storage.variables import Stored

import tensorflow as tf

Places = Sequence[Sequence[Coordinate]]


class SliceGradients:
    """Gradients of the slices; see `kdist.optimizer.gradients.GradientSource`.

    A slice computes on one device, which has gradients of whole variables, or on several, each with
    that of its part. A weight that several stages of a pipeline use has a gradient on each of them
    through which one flows; they are summed like those of replicas. What overwrites its variable
    (the maxima of float8 training) is not summed: the largest counts, as Keras has it where
    gradients accumulate.

    Args:
        gradients: Per slice, by trainable variable, its gradient on each device that computes;
            rows of a table as rows, or as (values, indices).
        rows: How variables whose gradient is rows are looked up.
        entries: `Stored` of each trainable variable.
        devices: Per slice of the mesh that stores weights, the devices that compute.
        places: Per slice and device there, which slice and device of `gradients` that is; the same
            by default.

    Attributes:
        once: Gradients that are there once for all slices, on the first one's first device, by
            trainable variable: of weights that a loss over the whole batch uses; of penalties of
            fetched tables, where these are.
    """

    def __init__(
        self,
        gradients: Mapping[int, Mapping[int, Sequence[Any]]],
        rows: Mapping[int, sparse.LookUp],
        entries: Sequence[Stored],
        devices: Sequence[Sequence[str]],
        places: Places | None = None,
    ) -> None:
        self.gradients, self.look_ups = gradients, rows
        self.once: Mapping[int, Any] = {}
        self.entries, self.devices = list(entries), list(devices)
        self.placements = [entry.placement for entry in entries]
        self._whole = len(devices[0]) == 1
        self._places = places
        self._tables: dict[int, Any] = {}

    def joined(self, once: Mapping[int, Any]) -> SliceGradients:
        """These, and more gradients that are there once for all slices; see `once`."""
        given = self.gradients, self.look_ups, self.entries, self.devices
        found = SliceGradients(*given, self._places)
        found.once = by_position(self.once, once)
        return found

    @property
    def rows(self) -> set[int]:
        """See `GradientSource`; both kinds of gradients have to be rows for their sum to be."""
        used = {v for one in self.gradients.values() for v in one}
        once = {v for v, gradient in self.once.items() if sparse.is_sparse(gradient)}
        return (set(self.look_ups) - set(self.once)) | (once - (used - set(self.look_ups)))

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        placement = self.placements[variable]
        if unit.span is not None and unit.dim == 0 and variable in self.rows and self._whole:
            return self._rows_of_table(variable, unit)
        if unit.shard is not None:
            at = self.entries[variable].device(unit.owner)
            index = unit.index(placement)
            return self._at(variable, unit.owner[1], index, (unit.algorithm, at))
        if self._whole:
            return self._at(variable, 0, None)
        join = join_columns if variable in self.rows else whole_of
        return join(placement, lambda k: self._at(variable, k, None))

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        placement = self.placements[variable]
        if at[0] not in placement.slices:
            return None
        index = placement.inner_index(at[1])
        parts = []
        if (found := self._found(variable, *at)) is not None:
            own = self._own(variable, at[1])
            parts.append(self._cut(tf.convert_to_tensor(found), index, own))
        if at[0] == placement.slices[0] and variable in self.once:
            part = part_of(self.once[variable], index, placement.shape)
            parts.append(tf.convert_to_tensor(part))
        if not parts:  # a tied weight, on a stage through which no gradient flows
            return tf.zeros(shape_of(index), self.entries[variable].variable.dtype)
        return parts[0] if len(parts) == 1 else tf.add_n(parts)

    def _found(self, variable: int, s: int, k: int) -> Any:
        """What a coordinate of the mesh computed, None for nothing."""
        k = 0 if self._whole else k
        if self._places is not None:
            s, k = self._places[s][k]
        parts = self.gradients.get(s, {}).get(variable)
        if parts is None:
            return None
        entry = self.entries[variable]
        if isinstance(entry, FetchedTable):
            return entry.rows_of(s, k, parts[k])
        return as_gradient(parts[k], self.placements[variable])

    def _own(self, variable: int, k: int) -> Index:
        """The part of a variable that a gradient at inner coordinate `k` is of."""
        placement = self.placements[variable]
        whole = tuple(slice(0, n) for n in placement.shape)
        if self._whole:
            return whole
        # Rows are of the whole table, whatever rows of it the coordinate stores.
        index = placement.inner_index(k)
        return (whole[0], *index[1:]) if variable in self.look_ups else index

    @staticmethod
    def _cut(gradient: Any, index: Index, own: Index) -> Any:
        """The part at `index` of a gradient that is of the part `own`."""
        return part_of(gradient, relative(index, own), shape_of(own))

    def _at(
        self, variable: int, k: int, index: Index | None, to: tuple[str, str] | None = None
    ) -> Any:
        """Sum over slices of what inner coordinate `k` has of the part at `index`; None: of all.

        Args:
            variable: Position of the variable.
            k: The coordinate.
            index: The part.
            to: By which algorithm it goes to which device; None: directly to the one in scope.
        """
        placement, own = self.placements[variable], self._own(variable, k)
        index = own if index is None else index
        look_up = self.look_ups.get(variable, sparse.LookUp())
        parts: dict[tuple[sparse.LookUp, int | None], list[Any]] = {}
        devices = []
        for s in placement.slices:
            if (found := self._found(variable, s, k)) is not None:
                devices.append(self.devices[s][0 if self._whole else k])
                stage = self.entries[variable].topology.slices[s].stage
                with tf.device(devices[-1]):
                    for piece, how in look_up.pieces(found, stage):
                        # Each stage has rows of its own that all of its replicas look up.
                        key = how, None if how.by_batch else stage
                        parts.setdefault(key, []).append(self._cut(piece, index, own))
        if self.entries[variable].variable.overwrite_with_gradient:
            return self._largest(variable, k, index, parts, devices)
        sums = [add_gradients(of, how, devices, variable, to) for (how, _), of in parts.items()]
        if variable in self.once:
            with tf.device(self.devices[placement.slices[0]][0]):
                sums.append(part_of(self.once[variable], index, placement.shape))
        return sums[0] if len(sums) == 1 else add_gradients(sums, sparse.LookUp())

    def _largest(
        self,
        variable: int,
        k: int,
        index: Index,
        parts: Mapping[Any, list[Any]],
        devices: Sequence[str],
    ) -> Any:
        """Of the new values that a variable is overwritten with, the largest; see `_at`."""
        entry, slices = self.entries[variable], self.placements[variable].slices
        news = [tf.convert_to_tensor(one) for of in parts.values() for one in of]
        there = [s for s in slices if self._found(variable, s, k) is not None]
        stages = {entry.topology.slices[s].stage for s in there}
        if len(stages) + (variable in self.once) > 1:
            raise added_up(entry.variable)
        if not news:
            with tf.device(self.devices[slices[0]][0]):
                return part_of(self.once[variable], index, entry.placement.shape)
        return news[0] if len(news) == 1 else added(news, devices, REDUCE, variable, largest)

    def _rows_of_table(self, variable: int, unit: UpdateUnit) -> Any:
        """Of a table's gradient, what falls on some rows: joined once, then cut for each owner.

        Cutting before would repeat the cut on every slice.
        """
        placement = self.placements[variable]
        slices = [s for s in placement.slices if self._found(variable, s, 0) is not None]
        slices = slices or [placement.slices[0]]
        with tf.device(self.devices[slices[variable % len(slices)]][0]):
            if variable not in self._tables:
                self._tables[variable] = self._at(variable, 0, None)
            return part_of(self._tables[variable], unit.index(placement), placement.shape)


def part_of(gradient: Any, index: Index, shape: Sequence[int]) -> Any:
    """The part of a variable's gradient at `index`; `shape` is that of the gradient."""
    if isinstance(gradient, InParts):
        return gradient.at(index)
    if covers(index, shape):
        return gradient
    if sparse.is_sparse(gradient):
        return sparse.restrict(gradient, index, shape)
    return gradient[index]


def add_gradients(
    parts: Sequence[Any],
    look_up: sparse.LookUp,
    devices: Sequence[str] | None = None,
    turn: int = 0,
    to: tuple[str, str] | None = None,
) -> Any:
    """Sum of replicas' gradients; rows of embeddings stay rows (see `kdist.storage.sparse`).

    Args:
        parts: The gradients.
        look_up: How the variable is looked up.
        devices: Where each of them is; None: all on one.
        turn: See `transfer.added`.
        to: By which algorithm what is dense goes to which device; None: directly to the one in
            scope.
    """
    if all(sparse.is_sparse(p) for p in parts):
        return sparse.add(parts, look_up.by_batch, look_up.merged)
    if len(parts) == 1:
        return parts[0]
    dense = [tf.convert_to_tensor(p) for p in parts]
    if to is None or devices is None:
        return added(dense, devices, REDUCE, turn)
    algorithm, at = to
    return summed(dense, devices, at, algorithm, REDUCE, turn)


def by_position(some: Mapping[int, Any], others: Mapping[int, Any]) -> dict[int, Any]:
    """Gradients of both, by position; added where both have one."""
    found = dict(some)
    for v, gradient in others.items():
        found[v] = found[v] + gradient if v in found else gradient
    return found


def as_gradient(part: Any, placement: Placement) -> Any:
    """(values, indices) as rows of the whole table; anything else as it is."""
    if not isinstance(part, tuple | list):
        return part
    values, indices = part
    columns = [int(n) for n in values.shape[1:]]
    shape = tf.constant([placement.shape[0], *columns], indices.dtype)
    return tf.IndexedSlices(values, indices, shape)


def join_columns(placement: Placement, part: Callable[[int], Any]) -> Any:
    """Rows of the whole table from rows of its column blocks."""
    columns: dict[tuple[int, ...], tuple[Index, int]] = {}
    for index, k in distinct_parts(placement):
        columns.setdefault(tuple(dim.start for dim in index[1:]), (index, k))
    blocks = list(columns.values())
    rows = part(blocks[0][1])
    if len(blocks) == 1:
        return rows
    parts = [((slice(0, 1), *index[1:]), part(k).values) for index, k in blocks]
    shape = tf.constant(placement.shape, rows.indices.dtype)
    return tf.IndexedSlices(assemble(parts), rows.indices, shape)
