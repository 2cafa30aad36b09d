"""What comes out of programs over inner axes: gradients as the update reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.runtime.plain_runner import add_gradients, part_of
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate, Index, Placement, UpdateUnit, relative, shape_of
from kdist.storage.parts import distinct_parts, whole_of
from kdist.storage.sparse import LookUp
from kdist.storage.variables import Stored, assemble

import tensorflow as tf


class SliceGradients:
    """Reads the slices' gradients as the update asks for them: a unit's part, summed.

    A weight that several stages of a pipeline use has a gradient on each of them, through which
    one flows; they are summed like those of replicas.

    Args:
        gradients: Per slice, by trainable variable, its gradient on each device of the slice; rows
            of embeddings as rows, or as (values, indices).
        rows: How variables whose gradient is rows are looked up.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        places: Per slice and device, which slice and device of `gradients` that is; the same by
            default.
    """

    def __init__(
        self,
        gradients: Mapping[int, Mapping[int, Sequence[Any]]],
        rows: Mapping[int, LookUp],
        entries: Sequence[Stored],
        topology: Topology,
        places: Sequence[Sequence[Coordinate]] | None = None,
    ) -> None:
        self.gradients = gradients
        self.look_ups = rows
        self.rows = set(rows)
        self.entries = list(entries)
        self.placements = [entry.placement for entry in entries]
        self.topology = topology
        self._tables: dict[int, Any] = {}
        self.places = topology.places_in(topology) if places is None else places

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `kdist.optimizer.gradients.GradientSource`."""
        s, k = at
        if s not in self.placements[variable].slices:
            return None
        if (slices := self._slices(variable)) and s not in slices:
            index = self.placements[variable].inner_index(k)
            return tf.zeros(shape_of(index), self.entries[variable].variable.dtype)
        return self._found(variable, s, k)

    def _found(self, variable: int, s: int, k: int) -> Any:
        """What a coordinate of the mesh computed."""
        s, k = self.places[s][k]
        return self.gradients[s][variable][k]

    def _slices(self, variable: int) -> list[int]:
        """The slices that have a gradient of a variable."""
        used = self.placements[variable].slices
        return [s for s in used if variable in self.gradients.get(self.places[s][0][0], {})]

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """The unit's part of each slice's gradient, summed."""
        placement = self.placements[variable]
        if unit.rows is not None and variable in self.rows and self.topology.inner_size == 1:
            return self._rows_of_table(variable, unit)
        if unit.shard is not None:
            return self._at(variable, unit.owner[1], unit.index(placement))
        if variable not in self.rows:
            return whole_of(placement, lambda k: self._at(variable, k, None))
        return join_columns(placement, lambda k: self._at(variable, k, None))

    def _rows_of_table(self, variable: int, unit: UpdateUnit) -> Any:
        """Of a table's gradient, what falls on some rows: joined once; see `PlainGradients`."""
        placement, slices = self.placements[variable], self.topology.slices
        with tf.device(slices[variable % len(slices)].devices[0]):
            if variable not in self._tables:
                self._tables[variable] = self._at(variable, 0, None)
            return part_of(self._tables[variable], unit.index(placement), placement.shape)

    def _at(self, variable: int, k: int, index: Index | None) -> Any:
        """Sum over slices of what inner coordinate `k` has of the part at `index`."""
        placement = self.placements[variable]
        parts = []
        for s in self._slices(variable):
            with tf.device(self.topology.slices[s].devices[k]):
                part = as_gradient(self._found(variable, s, k), placement)
                if index is not None:
                    base = self._base(variable, k)
                    shape = [b.stop - b.start for b in base]
                    part = part_of(part, relative(index, base), shape)
                parts.append(part)
        return add_gradients(parts, self.look_ups.get(variable, LookUp()))

    def _base(self, variable: int, k: int) -> Index:
        """The part of a variable that a gradient at inner coordinate `k` is of."""
        placement = self.placements[variable]
        index = placement.inner_index(k)
        if variable in self.rows:
            # Rows are of the whole table, whatever rows of it the coordinate stores.
            return (slice(0, placement.shape[0]), *index[1:])
        return index


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
