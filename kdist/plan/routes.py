"""How sums of gradients, and new values, go between processes: by which messages. Pure.

Each process first adds up what its own devices have. From there on processes are the ranks of a
`reduce`, whose root is the process of the owner, and then of a `broadcast` from it. Several buckets
are under way at once, so that what counts is how long the busiest process sends, or receives; and
that no single bucket takes longer than all together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from kdist.comm.algorithms import ALGORITHMS, schedule
from kdist.comm.cost import DEFAULT_LINK, LinkCost
from kdist.comm.messages import Schedule
from kdist.config.fusion import FusionConfig
from kdist.plan.bucket import Bucket
from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Placement
from kdist.storage.transfer import process_of

import numpy as np

LESS = 1 - 1e-9
"""Times that differ by less are equal."""
FEW = 256
"""Choices that are all looked at."""


def pieces(elements: int, count: int) -> list[int]:
    """Sizes of the pieces that a vector is cut into, the first ones larger by one."""
    least, more = divmod(elements, count)
    return [least + (n < more) for n in range(count)]


@dataclasses.dataclass(frozen=True)
class Route:
    """How one part of a value goes between processes.

    Attributes:
        schedule: The messages.
        sizes: Elements of each chunk.
    """

    schedule: Schedule
    sizes: tuple[int, ...]

    def sent(self, itemsize: int) -> int:
        """Bytes of all messages."""
        return int(self.schedule.sent_bytes([size * itemsize for size in self.sizes]))


@functools.lru_cache(maxsize=256)
def _schedule(operation: str, algorithm: str, size: int, root: int = 0) -> Schedule:
    """As `kdist.comm.algorithms.schedule`, without messages that bring a root what it has."""
    made = schedule(operation, algorithm, size, root)
    if operation == "reduce":
        return made
    kept = [tuple(m for m in messages if m.target != root) for messages in made.rounds]
    return dataclasses.replace(made, rounds=tuple(filter(None, kept)))


@functools.lru_cache(maxsize=4096)
def routes(
    operation: str, algorithm: str, size: int, root: int, elements: int, width: int = 1
) -> tuple[Route, ...]:
    """The messages between processes for one value.

    Args:
        operation: `"reduce"` or `"broadcast"`.
        algorithm: One of `kdist.comm.algorithms.ALGORITHMS`, or `"torus"`.
        size: Number of processes.
        root: Rank that gets, or has, the value.
        elements: Of the value.
        width: For a torus, devices of each process: part i of the value goes round between the
            devices i.

    Returns:
        For each part of the value; one part but for a torus. None at all for `"direct"`, and for a
        value of fewer elements than chunks, which goes directly.
    """
    if algorithm == "direct" or size < 2:
        return ()
    name, width = ("ring", width) if algorithm == "torus" else (algorithm, 1)
    made = _schedule(operation, name, size, root)
    cut = [tuple(pieces(part, made.pieces)) for part in pieces(elements, width)]
    return tuple(Route(made, sizes) for sizes in cut) if min(map(min, cut)) else ()


@dataclasses.dataclass(frozen=True)
class Sum:
    """Gradients that are summed together, and new values that go back.

    Attributes:
        nbytes: Of the sum.
        root: Rank of the process that gets it.
        size: Number of processes.
    """

    nbytes: int
    root: int
    size: int


@dataclasses.dataclass(frozen=True)
class _Load:
    """What a reduce and a broadcast cost, in messages and in multiples of the value's bytes.

    Attributes:
        ports: For each rank its messages and bytes, of the busier of its two directions.
        critical: Messages and bytes one after the other.
    """

    ports: Any
    critical: tuple[float, float]


@functools.lru_cache(maxsize=4096)
def _load(algorithm: str, size: int, root: int) -> _Load:
    if root:
        first, ranks = _load(algorithm, size, 0), np.arange(size)
        ranks = ranks ^ root if algorithm == "hypercube" else (ranks - root) % size
        return _Load(first.ports[ranks], first.critical)
    both = np.zeros([2, size, 2])
    critical = np.zeros(2)
    for operation in ("reduce", "broadcast"):
        made = _schedule(operation, algorithm, size)
        for messages in made.rounds:
            critical += 1, max(len(m.chunks) for m in messages) / made.pieces
            for m in messages:
                for way, rank in enumerate((m.source, m.target)):
                    both[way, rank] += 1, len(m.chunks) / made.pieces
    return _Load(both.max(0), (float(critical[0]), float(critical[1])))


def seconds(groups: Sequence[Sequence[Sum]], algorithms: Sequence[str], link: LinkCost) -> float:
    """Predicted seconds until all sums are made and all new values are back.

    Args:
        groups: What is summed; sums of one group go the same way.
        algorithms: How each group goes.
        link: A message between processes.
    """
    costs = [_cost(group, how, link) for group, how in zip(groups, algorithms, strict=True)]
    return _ends(costs)


def _ends(costs: Sequence[tuple[Any, float]]) -> float:
    """Seconds until several that are under way together have ended."""
    busy = _added([ports for ports, _ in costs])
    return max([float(busy.max(initial=0.0)), *(alone for _, alone in costs)])


def _added(rows: Sequence[Any]) -> Any:
    total = np.zeros(max(map(len, rows), default=0))
    for row in rows:
        total[: len(row)] += row
    return total


def _cost(group: Sequence[Sum], algorithm: str, link: LinkCost) -> tuple[Any, float]:
    """Seconds of every process's port, and of the longest sum from start to end."""
    ports, alone = [], [0.0]
    for one in group:
        load, constants = _load(algorithm, one.size, one.root), (link.a, link.b * one.nbytes)
        ports.append(load.ports @ constants)
        alone.append(float(np.dot(load.critical, constants)))
    return _added(ports), max(alone)


def choose(groups: Sequence[Sequence[Sum]], link: LinkCost) -> list[str]:
    """The algorithm for each of several groups of sums that are under way together.

    Of few groups every choice is looked at. Of more, from every way that all may go, one group
    after the other, the largest first, is changed to what makes all end sooner; the best end
    counts, and among equals the first algorithm's. A torus is left to who asks for it: through one
    port a process it is a ring with more messages.

    Args:
        groups: What is summed; sums of one group go the same way.
        link: A message between processes.

    Returns:
        One of `kdist.comm.algorithms.ALGORITHMS` for each.
    """
    sizes = {one.size for group in groups for one in group}
    if max(sizes, default=0) < 3:  # of two, one sends and one receives, however they do
        return ["direct"] * len(groups)
    usable = [a for a in ALGORITHMS if a != "hypercube" or not any(n & (n - 1) for n in sizes)]
    tables = [{how: _cost(group, how, link) for how in usable} for group in groups]
    if len(usable) ** len(groups) <= FEW:
        return _best(tables, usable)
    return _improved(groups, tables, usable)


def _best(tables: Sequence[Mapping[str, Any]], usable: Sequence[str]) -> list[str]:
    """See `choose`; `tables` has the cost of each group, by algorithm."""
    best, soonest = ["direct"] * len(tables), math.inf
    for found in itertools.product(usable, repeat=len(tables)):
        ends = _ends([table[how] for table, how in zip(tables, found)])
        if ends < soonest * LESS:
            best, soonest = list(found), ends
    return best


def _improved(
    groups: Sequence[Sequence[Sum]], tables: Sequence[Mapping[str, Any]], usable: Sequence[str]
) -> list[str]:
    """See `choose`."""
    order = sorted(range(len(groups)), key=lambda n: -sum(one.nbytes for one in groups[n]))
    best, soonest = ["direct"] * len(groups), math.inf
    for start in usable:
        found = [start] * len(groups)
        costs = [table[start] for table in tables]
        busy, ends = _added([ports for ports, _ in costs]), _ends(costs)
        for n in order * 2:
            others = max((alone for m, (_, alone) in enumerate(costs) if m != n), default=0.0)
            without = _added([busy, -costs[n][0]])
            for how in usable:
                mine = tables[n][how]
                if (end := _ends([(without, others), mine])) < ends * LESS:
                    found[n], costs[n], ends = how, mine, end
            busy = _added([without, costs[n][0]])
        if ends < soonest * LESS:
            best, soonest = found, ends
    return best


def routed(
    units: Sequence[UpdateUnit],
    buckets: Sequence[Bucket],
    placements: Sequence[Placement],
    topology: Topology,
    fusion: FusionConfig,
    direct: Collection[int],
) -> tuple[UpdateUnit, ...]:
    """Says how the sum for each unit, and its new value, go between processes.

    Args:
        units: Who updates which part.
        buckets: What travels as one vector per owner.
        placements: One per trainable variable.
        topology: The mesh.
        fusion: The settings.
        direct: Variables whose gradients go directly: rows, maxima, what travels compressed.

    Raises:
        ValueError: The algorithm is not for so many processes.
    """
    if len({process_of(device) for device in topology.devices}) < 2:
        return tuple(units)
    fused = {n for bucket in buckets for each in bucket.units for n in each}
    sums: dict[Hashable, list[tuple[int, ...]]] = {
        n: list(bucket.units) for n, bucket in enumerate(buckets)
    }
    for n, unit in enumerate(units):
        if n not in fused:
            sums.setdefault((unit.variable, unit.shard), []).append((n,))
    members, groups = [], []
    for each in sums.values():
        first = units[each[0][0]]
        apart = first.variable in direct or first.replicated
        if not apart and first.shard is not None and first.owner != HOST:
            group = [_sum_of(numbers, units, placements, topology) for numbers in each]
            if any(one.size > 1 for one in group):
                members.append([n for numbers in each for n in numbers])
                groups.append(group)
    if fusion.algorithm == "auto":
        ways = choose(groups, fusion.link or DEFAULT_LINK)
    else:
        _check(fusion.algorithm, groups)
        ways = [fusion.algorithm] * len(groups)
    how = {n: way for numbers, way in zip(members, ways) for n in numbers}
    return tuple(
        dataclasses.replace(unit, algorithm=how.get(n, "direct")) for n, unit in enumerate(units)
    )


def _sum_of(
    group: Sequence[int],
    units: Sequence[UpdateUnit],
    placements: Sequence[Placement],
    topology: Topology,
) -> Sum:
    first = units[group[0]]
    owner = process_of(topology.device(first.owner))
    senders = [(s, first.owner[1]) for s in placements[first.variable].slices]
    ranks = list(dict.fromkeys([*(process_of(topology.device(at)) for at in senders), owner]))
    nbytes = sum(units[n].nbytes(placements[units[n].variable]) for n in group)
    return Sum(nbytes, ranks.index(owner), len(ranks))


def _check(algorithm: str, groups: Sequence[Sequence[Sum]]) -> None:
    sizes = {one.size for group in groups for one in group}
    if algorithm == "hypercube" and (wrong := [size for size in sizes if size & (size - 1)]):
        raise ValueError(
            "A hypercube has a power of two of processes. Use FusionConfig(algorithm='halving'), "
            "'tree' or 'auto'. Received: algorithm='hypercube', and gradients that "
            f"{wrong[0]} processes add up"
        )
