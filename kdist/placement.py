"""Which device stores which part of each variable, and which device updates it.

Pure arithmetic over a `Topology` and `WeightLayout`s: nothing here touches a device, so the same
answer serves the engine, the printed plan and the tests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kdist.layout import WeightLayout
from kdist.mesh import Topology

Index = tuple[slice, ...]
Coordinate = tuple[int, int]
"""(slice, inner): the data coordinate, and the flat index over the inner axes."""


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
        return tuple(s.stop - s.start for s in self.index)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one variable is cut and where its parts live.

    Attributes:
        path: The Keras path of the variable.
        shape: Its whole shape.
        itemsize: Bytes per element.
        layout: The mesh axes that cut each dim.
        shards: The distinct parts, in row-major order of their start.
        table: `table[slice][inner]` is the number of the shard stored there.
        data_dim: The dim stored sliced over the data axis (ZeRO-3 for this weight), if any.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: WeightLayout
    shards: tuple[Shard, ...]
    table: tuple[tuple[int, ...], ...]
    data_dim: int | None = None

    @property
    def is_whole(self) -> bool:
        """True when every device keeps the whole variable."""
        return len(self.shards) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return math.prod(self.shape) * self.itemsize

    def shard_at(self, coordinate: Coordinate) -> Shard:
        """The shard stored at a (slice, inner) coordinate."""
        return self.shards[self.table[coordinate[0]][coordinate[1]]]

    def inner_index(self, inner: int) -> Index:
        """The part of the variable that compute sees at an inner coordinate.

        It is the stored part, made whole again over the data axis.
        """
        index = list(self.shard_at((0, inner)).index)
        if self.data_dim is not None:
            dim = self.data_dim
            starts = [self.shard_at((s, inner)).index[dim] for s in range(len(self.table))]
            index[dim] = slice(min(i.start for i in starts), max(i.stop for i in starts))
        return tuple(index)


def place(
    path: str, shape: Sequence[int], itemsize: int, layout: WeightLayout, topology: Topology
) -> Placement:
    """Cuts a variable by its layout and lists who holds each part."""
    shape = tuple(int(n) for n in shape)
    holders: dict[tuple[tuple[int, int], ...], list[Coordinate]] = {}
    for s in range(topology.data_size):
        for k in range(topology.inner_size):
            index = layout.slice_of(shape, topology, coordinate_of(topology, s, k))
            holders.setdefault(tuple((i.start, i.stop) for i in index), []).append((s, k))
    keys = sorted(holders)
    shards = tuple(Shard(tuple(slice(a, b) for a, b in key), tuple(holders[key])) for key in keys)
    number = {c: n for n, shard in enumerate(shards) for c in shard.holders}
    table = tuple(
        tuple(number[s, k] for k in range(topology.inner_size)) for s in range(topology.data_size)
    )
    return Placement(path, shape, itemsize, layout, shards, table, layout.data_dim(topology))


def coordinate_of(topology: Topology, data: int, inner: int) -> dict[str, int]:
    """Mesh coordinates, by axis name, of a (slice, inner) pair."""
    coordinate = {}
    for name, size in reversed(topology.inner_axes):
        inner, coordinate[name] = divmod(inner, size)
    if topology.data_axis is not None:
        coordinate[topology.data_axis] = data
    return coordinate


@dataclasses.dataclass(frozen=True)
class UpdateUnit:
    """One optimizer update: a shard (or a whole variable) and the device that computes it."""

    variable: int
    """Position among the trainable variables."""
    shard: int | None
    """Number of the shard, or None for an update that needs the whole tensor."""
    owner: Coordinate
    """The (slice, inner) coordinate that keeps the optimizer state and computes the update."""


def assign_owners(
    placements: Sequence[Placement], whole: Sequence[bool], topology: Topology
) -> tuple[UpdateUnit, ...]:
    """Deals every update to exactly one device, balanced by bytes.

    Each part of each parameter is updated once, by one of the devices that hold it, which then
    sends the new value to the other holders: the traffic of a reduce and a broadcast is that of
    an all-reduce, and no device repeats another's optimizer math. Biggest first, to the least
    loaded holder (longest-processing-time rule, Graham 1969).

    Args:
        placements: One per trainable variable.
        whole: Per variable, True if its optimizer must see the whole tensor.
        topology: The mesh.

    Returns:
        The units, ordered by variable, then shard.
    """
    work: list[tuple[int, int, int | None, tuple[Coordinate, ...]]] = []
    every = tuple((s, k) for s in range(topology.data_size) for k in range(topology.inner_size))
    for v, placement in enumerate(placements):
        if whole[v] and not placement.is_whole:
            work.append((placement.nbytes, v, None, every))
        else:
            for n, shard in enumerate(placement.shards):
                size = math.prod(shard.shape) * placement.itemsize
                work.append((size, v, n, shard.holders))
    load = dict.fromkeys(every, 0)
    units = []
    for size, v, part, candidates in sorted(work, key=lambda w: (-w[0], w[1], w[2] or 0)):
        owner = min(candidates, key=lambda c: (load[c], c))
        load[owner] += size
        units.append(UpdateUnit(v, part, owner))
    return tuple(sorted(units, key=lambda u: (u.variable, -1 if u.shard is None else u.shard)))


def relative(index: Index, base: Index) -> Index:
    """`index` expressed inside the part that lies at `base`."""
    return tuple(slice(i.start - b.start, i.stop - b.start) for i, b in zip(index, base))


def covers(index: Index, shape: Sequence[int]) -> bool:
    """True when `index` selects the whole of `shape`."""
    return all(i.start == 0 and i.stop == n for i, n in zip(index, shape))
