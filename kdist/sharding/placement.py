"""Which device stores which part of each variable.

Pure arithmetic over a `Topology` and `WeightLayout`s: nothing here touches a device, so the same
answer serves the engine, the printed plan and the tests.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import HOST, Topology

Index = tuple[slice, ...]
Coordinate = tuple[int, int]
"""(slice, inner): number of the slice in the topology, and the flat index over the inner axes."""

Group = tuple[int, ...]
"""Numbers of slices that compute with the same variables, in the order of the data axis."""


Way = Literal[
    "all-to-all", "all-gather", "reduce-scatter", "all-reduce", "local columns", "by columns"
]
"""How look-ups in a split table get their rows; see `TableSplit.way`."""


@dataclasses.dataclass(frozen=True)
class TableSplit:
    """How a table is split by hand, and how rows of it are looked up.

    Attributes:
        axis: The axis that its parts are on, by its name in the mesh.
        cuts_batch: Whether the axis cuts the batch, so that its devices look up different rows.
        alltoall: Whether devices may send each other blocks of unequal size.
        local_columns: Whether column j of all ids is of part j.
        dim: Of the table: 0 for parts of rows, 1 for parts of columns.
    """

    axis: str
    cuts_batch: bool
    alltoall: bool = False
    local_columns: bool = False
    dim: int = 0

    @property
    def way(self) -> Way:
        """What is done for the rows that a device looks up.

        "all-to-all" and "all-gather": each part gets the numbers of the rows that it has, and sends
        these rows. "reduce-scatter" and "all-reduce": each part gets all numbers, and sends a row
        for each, of zeros where it is not its own; their sum is the rows. "local columns": each
        part looks up its column, without being asked. "by columns": each part gets all numbers, and
        sends its columns of the rows.
        """
        if self.dim == 1:
            return "by columns"
        if self.local_columns:
            return "local columns"
        if self.alltoall:
            return "all-to-all" if self.cuts_batch else "all-gather"
        return "reduce-scatter" if self.cuts_batch else "all-reduce"

    @property
    def masked(self) -> bool:
        """Whether the parts send zeros for rows of others."""
        return not (self.local_columns or self.alltoall or self.dim)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A distinct part of a variable and the coordinates that store it."""

    index: Index
    """Where the part lies in the whole variable."""
    holders: tuple[Coordinate, ...]
    """Every (slice, inner) coordinate that keeps a copy of the part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return shape_of(self.index)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one variable is cut and where its parts live.

    Attributes:
        path: The Keras path of the variable.
        shape: Its whole shape.
        itemsize: Bytes per element.
        layout: The mesh axes that cut each dim.
        shards: The distinct parts, in row-major order of their start.
        table: `table[slice][inner]` is the number of the shard that compute there uses, if it does.
        data_dim: The dim stored sliced over the data axis (ZeRO-3 for this weight), if any.
        resident: The only slice that stores the variable; None if every slice does. Others get
            it before use.
        split: How it is split by hand, in parts of any size; None if it is not.
        groups: The slices of each stage that computes with the variable; one group, of all slices,
            where the model is not cut into stages.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: WeightLayout
    shards: tuple[Shard, ...]
    table: tuple[tuple[int, ...], ...]
    data_dim: int | None = None
    resident: int | None = None
    groups: tuple[Group, ...] = ()
    split: TableSplit | None = None

    @property
    def home(self) -> Group:
        """The first group: where a variable that slices share out among themselves is stored."""
        return self.groups[0] if self.groups else tuple(range(len(self.table)))

    @property
    def slices(self) -> Group:
        """The slices that compute with the variable."""
        return tuple(s for group in self.groups for s in group) if self.groups else self.home

    @property
    def is_whole(self) -> bool:
        """True when the variable is not cut."""
        return len(self.shards) == 1

    @property
    def gathered(self) -> bool:
        """True when a slice has to get parts from others before it computes."""
        return self.data_dim is not None or self.resident is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return math.prod(self.shape) * self.itemsize

    @property
    def on_host(self) -> bool:
        """True for a table that is on the host, of which slices get rows."""
        return self.shards[0].holders == (HOST,)

    @property
    def fetched(self) -> bool:
        """True for a table of which slices get the rows that they look up."""
        return self.on_host or self.split is not None

    def shard_at(self, coordinate: Coordinate) -> Shard:
        """The shard that compute at a (slice, inner) coordinate uses."""
        if self.on_host:
            return self.shards[0]
        return self.shards[self.table[coordinate[0]][coordinate[1]]]

    def source(self, coordinate: Coordinate) -> Coordinate:
        """Where compute at a coordinate gets its shard from: itself, unless it stores none."""
        if self.on_host:
            return HOST
        if self.resident is None:
            return coordinate
        return self.resident, coordinate[1]

    def stored_bytes(self, coordinate: Coordinate) -> int:
        """Bytes of the variable that a coordinate stores."""
        held = next((shard for shard in self.shards if coordinate in shard.holders), None)
        return 0 if held is None else math.prod(held.shape) * self.itemsize

    def inner_index(self, inner: int) -> Index:
        """The part of the variable that compute sees at an inner coordinate.

        It is the stored part, made whole again over the data axis, or over all parts of columns.
        """
        if self.split is not None and self.split.dim == 1:
            return tuple(slice(0, n) for n in self.shape)
        index = list(self.shard_at((0, inner)).index)
        if self.data_dim is not None:
            dim = self.data_dim
            starts = [self.shard_at((s, inner)).index[dim] for s in range(len(self.table))]
            index[dim] = slice(min(i.start for i in starts), max(i.stop for i in starts))
        return tuple(index)

    def computes_like(self, other: Placement) -> bool:
        """Whether compute sees the same parts in the same stages; slices may share them out."""
        if (self.split, self.groups, self.on_host) != (other.split, other.groups, other.on_host):
            return False
        inner = range(0 if self.on_host else len(self.table[0]))
        return all(self.inner_index(k) == other.inner_index(k) for k in inner)


def place(
    path: str,
    shape: Sequence[int],
    itemsize: int,
    layout: WeightLayout,
    topology: Topology,
    resident: int | None = None,
    groups: Sequence[Group] = (),
) -> Placement:
    """Cuts a variable by its layout and lists who holds each part.

    Args:
        path: Keras path of the variable.
        shape: Its whole shape.
        itemsize: Bytes per element.
        layout: The mesh axes that cut each dim.
        topology: The mesh.
        resident: The only slice to store it; every slice by default.
        groups: See `Placement`; what slices share out is stored by the first group alone.
    """
    shape = tuple(int(n) for n in shape)
    holders: dict[tuple[tuple[int, int], ...], list[Coordinate]] = {}
    for s, one in enumerate(topology.slices):
        for k in range(topology.inner_size):
            index = layout.slice_of(shape, topology, coordinate_of(topology, one.index, k))
            holders.setdefault(tuple((i.start, i.stop) for i in index), []).append((s, k))
    keys = sorted(holders)
    number = {c: n for n, key in enumerate(keys) for c in holders[key]}
    data_dim = layout.data_dim(topology)
    storing = {s for group in groups for s in group} or set(range(len(topology.slices)))
    if resident is not None:
        storing = {resident}
    elif data_dim is not None and groups:
        storing = set(groups[0])
    shards = tuple(
        Shard(
            tuple(slice(a, b) for a, b in key),
            tuple(c for c in holders[key] if c[0] in storing),
        )
        for key in keys
    )
    table = tuple(
        tuple(number[s, k] for k in range(topology.inner_size)) for s in range(len(topology.slices))
    )
    groups = tuple(groups)
    return Placement(path, shape, itemsize, layout, shards, table, data_dim, resident, groups)


def place_on_host(
    path: str,
    shape: Sequence[int],
    itemsize: int,
    topology: Topology,
    groups: Sequence[Group] = (),
) -> Placement:
    """Puts a variable on the host, whole; see `place`."""
    shape = tuple(int(n) for n in shape)
    shard = Shard(tuple(slice(0, n) for n in shape), (HOST,))
    table = ((0,) * topology.inner_size,) * len(topology.slices)
    layout = WeightLayout.replicated(len(shape))
    return Placement(path, shape, itemsize, layout, (shard,), table, groups=tuple(groups))


def place_split(
    path: str,
    shape: Sequence[int],
    itemsize: int,
    sizes: Sequence[int],
    split: TableSplit,
    topology: Topology,
    groups: Sequence[Group] = (),
) -> Placement:
    """Splits rows or columns of a table over an axis, in parts of any size; see `place`.

    Args:
        path: See `place`.
        shape: See `place`.
        itemsize: See `place`.
        sizes: Rows or columns of each part; as many as the axis has devices.
        split: Which of them, and over which axis.
        topology: See `place`.
        groups: See `place`.
    """
    shape = tuple(int(n) for n in shape)
    ends = itertools.accumulate(sizes)
    whole = [slice(0, n) for n in shape]
    table = tuple(
        tuple(coordinate_of(topology, one.index, k)[split.axis] for k in range(topology.inner_size))
        for one in topology.slices
    )
    storing = {s for group in groups for s in group} or set(range(len(topology.slices)))
    shards = tuple(
        Shard(
            (*whole[: split.dim], slice(end - count, end), *whole[split.dim + 1 :]),
            tuple((s, k) for s in sorted(storing) for k, n in enumerate(table[s]) if n == part),
        )
        for part, (count, end) in enumerate(zip(sizes, ends, strict=True))
    )
    layout = WeightLayout.replicated(len(shape))
    return Placement(
        path, shape, itemsize, layout, shards, table, groups=tuple(groups), split=split
    )


def coordinate_of(topology: Topology, data: int, inner: int) -> dict[str, int]:
    """Mesh coordinates, by axis name, of a (slice, inner) pair."""
    coordinate = {}
    for name, size in reversed(topology.inner_axes):
        inner, coordinate[name] = divmod(inner, size)
    if topology.data_axis is not None:
        coordinate[topology.data_axis] = data
    return coordinate


def relative(index: Index, base: Index) -> Index:
    """`index` expressed inside the part that lies at `base`."""
    return tuple(slice(i.start - b.start, i.stop - b.start) for i, b in zip(index, base))


def overlap(a: Index, b: Index) -> Index | None:
    """What two boxes have in common; None if nothing."""
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return None if any(one.stop <= one.start for one in both) else both


def shape_of(index: Index) -> tuple[int, ...]:
    """Shape of the part of a variable at `index`."""
    return tuple(i.stop - i.start for i in index)


def covers(index: Index, shape: Sequence[int]) -> bool:
    """True when `index` selects the whole of `shape`."""
    return all(i.start == 0 and i.stop == n for i, n in zip(index, shape))
