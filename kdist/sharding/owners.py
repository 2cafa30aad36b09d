"""Which device updates which part of each variable: pure arithmetic over placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.placement import Coordinate, Index, Placement


@dataclasses.dataclass(frozen=True)
class UpdateUnit:
    """One optimizer update: a part of a variable (or all of it) and the device that computes it."""

    variable: int
    """Position among the trainable variables."""
    shard: int | None
    """Number of the shard, or None for an update that needs the whole tensor."""
    owner: Coordinate
    """The (slice, inner) coordinate that keeps the optimizer state and computes the update."""
    span: tuple[int, int] | None = None
    """Only this part (start, stop, of dim `dim` of the variable) of the shard; None: all of it."""
    replicated: bool = False
    """Every slice has such a unit and keeps what it updates; else the owner sends it on."""
    algorithm: str = "direct"
    """How its gradient's sum, and its new value, go between processes."""
    dim: int = 0
    """Which dim `span` is of."""

    def index(self, placement: Placement) -> Index:
        """Which part of the whole variable the unit updates."""
        if self.shard is None:
            return tuple(slice(0, n) for n in placement.shape)
        index = placement.shards[self.shard].index
        if self.span is None:
            return index
        return (*index[: self.dim], slice(*self.span), *index[self.dim + 1 :])

    def nbytes(self, placement: Placement) -> int:
        """Bytes of that part."""
        shape = (i.stop - i.start for i in self.index(placement))
        return math.prod(shape) * placement.itemsize


def assign_owners(
    placements: Sequence[Placement],
    whole: Sequence[bool],
    topology: Topology,
    cut: Sequence[int | None] | None = None,
    together: Sequence[Hashable | None] | None = None,
    kinds: Sequence[int] = (),
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
        cut: Per variable, the dim of its shards that is dealt out over the slices, one part each
            (`partition="slice"`), or None; none by default. Its size must divide.
        together: Per variable, a key: parts of variables with the same key that may have the same
            owners have them. None, the default, for no such wish.
        kinds: Per variable, a number: those of equal size are dealt out kind after kind.

    Returns:
        The units, ordered by variable, shard, span.
    """
    every = tuple((s, k) for s in range(len(topology.slices)) for k in range(topology.inner_size))
    work: list[tuple[int, list[UpdateUnit], list[tuple[Coordinate, ...]]]] = []
    for v, placement in enumerate(placements):
        if whole[v] and not placement.is_whole:
            near = tuple(
                c for c in every if c[0] in placement.slices and placement.resident in (None, c[0])
            )
            work.append((placement.nbytes, [UpdateUnit(v, None, every[0])], [(c,) for c in near]))
        elif cut is not None and (dim := cut[v]) is not None:
            work.extend(_cut_shards(v, placement, dim))
        elif placement.data_dim is not None:
            work.extend(_cut_over_data(v, placement))
        else:
            for n, shard in enumerate(placement.shards):
                unit = UpdateUnit(v, n, every[0])
                work.append((unit.nbytes(placement), [unit], [(c,) for c in shard.holders]))
    load = dict.fromkeys((*every, HOST), 0)
    units = []
    for size, families, choices in _merged(work, together, kinds or [0] * len(placements)):
        owners = min(choices, key=lambda c: (load[c[0]], c))
        for family in families:
            units += [dataclasses.replace(unit, owner=o) for unit, o in zip(family, owners)]
        for owner in owners[: len(families[0])]:
            load[owner] += size // len(families[0])
    return tuple(sorted(units, key=_order))


def _merged(
    work: Sequence[Any], together: Sequence[Hashable | None] | None, kinds: Sequence[int]
) -> list[Any]:
    """What is dealt out at once: (bytes, families, choices), biggest first."""
    groups: dict[Any, list[Any]] = {}
    for n, (_, family, choices) in enumerate(work):
        wish = None if together is None or family[0].shard is None else together[family[0].variable]
        key = n if wish is None else (wish, tuple(choices), len(family))
        groups.setdefault(key, []).append(work[n])
    merged = [
        (sum(size for size, _, _ in group), [family for _, family, _ in group], group[0][2])
        for group in groups.values()
    ]

    def rank(one: Any) -> tuple[Any, ...]:
        first = one[1][0][0]
        return -one[0], kinds[first.variable], _order(first)

    return sorted(merged, key=rank)


def _cut_shards(v: int, placement: Placement, dim: int) -> list:
    """Per shard, one part of a dim per slice, owned by one inner coordinate in all slices."""
    found = []
    home, replicas = placement.home, len(placement.home)
    for n, shard in enumerate(placement.shards):
        whole = shard.index[dim]
        size = (whole.stop - whole.start) // replicas
        spans = [(whole.start + s * size, whole.start + (s + 1) * size) for s in range(replicas)]
        family = [UpdateUnit(v, n, (s, 0), span, dim=dim) for s, span in zip(home, spans)]
        inner = sorted({k for _, k in shard.holders})
        choices = [tuple((s, k) for s in home) for k in inner]
        found.append((sum(u.nbytes(placement) for u in family), family, choices))
    return found


def _cut_over_data(v: int, placement: Placement) -> list:
    """Shards that differ in their data coordinate only, owned by one inner coordinate."""
    families: dict[tuple[int, ...], list[int]] = {}
    for n, shard in enumerate(placement.shards):
        families.setdefault(tuple(sorted({k for _, k in shard.holders})), []).append(n)
    found = []
    for inner, numbers in families.items():
        numbers.sort(key=lambda n: placement.shards[n].holders[0][0])
        family = [UpdateUnit(v, n, (s, 0)) for s, n in zip(placement.home, numbers)]
        choices = [tuple((s, k) for s in placement.home) for k in inner]
        found.append((sum(u.nbytes(placement) for u in family), family, choices))
    return found


def _order(unit: UpdateUnit) -> tuple[int, int, int]:
    return unit.variable, -1 if unit.shard is None else unit.shard, (unit.span or (0, 0))[0]
