"""What a step sends from one process to another: of gradients, new values, gathered weights.

A tensor goes to another process once, however many of its devices read it, and each process adds up
its own summands first: see `kdist.storage.transfer`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kdist.display.tables import readable
from kdist.plan.bucket import values_from_host
from kdist.plan.routes import routes
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, Placement
from kdist.storage.transfer import process_of

import numpy as np

if TYPE_CHECKING:
    from kdist.plan.plan import Plan


@dataclasses.dataclass
class Crossing:
    """Tensors that go to another process, and their bytes, per step.

    Attributes:
        tensors: Their number.
        nbytes: Their bytes.
        ways: How many sums go by which algorithm.
        beside: What may go there too, and is not in these numbers.
    """

    tensors: int = 0
    nbytes: int = 0
    ways: dict[str, int] = dataclasses.field(default_factory=dict)
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        ways = ", ".join(f"{count} by {name}" for name, count in sorted(self.ways.items()))
        return (
            f"between processes: {self.tensors} tensors of gradients, new values and gathered "
            f"weights, {readable(self.nbytes)} per step"
            + f"; sums: {ways}" * bool(ways)
            + f"; not counted: {', '.join(self.beside)}" * bool(self.beside)
        )


def crossed_axes(topology: Topology) -> list[str]:
    """Inner axes along which neighbouring devices are in different processes."""
    sizes = [size for _, size in topology.inner_axes]
    found = []
    for n, (axis, _) in enumerate(topology.inner_axes):
        for one in topology.slices:
            at = np.array([hash(process_of(device)) for device in one.devices]).reshape(sizes)
            if axis not in found and np.diff(at, axis=n).any():
                found.append(axis)
    return found


def _beside(plan: Plan) -> tuple[str, ...]:
    """What is counted elsewhere in the plan, by bytes that follow from the batch."""
    topology = plan.topology
    axes = ", ".join(map(repr, crossed_axes(topology)))
    first = topology.slices[: topology.data_size]
    stages = any(
        process_of(near) != process_of(far)
        for n, one in enumerate(topology.slices)
        for near, far in zip(first[n % len(first)].devices, one.devices, strict=True)
    )
    tables = (*plan.tables(), *plan.host_tables(), *plan.split_tables())
    found = {
        f"what layers send over {axes}": axes,
        "what stages send": stages,
        "tables": tables,
        "compressed gradients": plan.compressed,
    }
    return tuple(what for what, there in found.items() if there)


@dataclasses.dataclass(frozen=True)
class Way:
    """By which algorithm something goes, and the bytes of an element of it."""

    algorithm: str = "direct"
    itemsize: int = 1


DIRECT = Way()


class _Counter:
    """Counts what crosses processes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found = Crossing()

    def send(
        self,
        source: Coordinate,
        targets: Iterable[Coordinate],
        nbytes: int,
        way: Way = DIRECT,
    ) -> None:
        """From one device to others: once to each process."""
        places = {self._process(source): {source}}
        for at in targets:
            places.setdefault(self._process(at), set()).add(at)
        others = len(places) - 1
        width = min(map(len, places.values()))
        if not self._routed("broadcast", way, len(places), nbytes, width):
            self.found.tensors += others
            self.found.nbytes += others * nbytes

    def add_up(
        self,
        sources: Iterable[Coordinate],
        target: Coordinate,
        nbytes: int,
        way: Way = DIRECT,
    ) -> None:
        """A sum of several devices' summands: each process sends its own sum."""
        mine: dict[object, list[Coordinate]] = {}
        for at in sources:
            mine.setdefault(self._process(at), []).append(at)
        count = len({*mine, self._process(target)})
        width = min(map(len, mine.values()), default=1)
        if count > 1:
            self.found.ways[way.algorithm] = self.found.ways.get(way.algorithm, 0) + 1
        if len(mine) < 2 or not self._routed("reduce", way, count, nbytes, width):
            for of_process in mine.values():
                self.send(of_process[0], [target], nbytes)

    def _routed(self, operation: str, way: Way, count: int, nbytes: int, width: int) -> bool:
        """Counts what goes by a schedule, if it does; as much, whoever the root is."""
        made = routes(operation, way.algorithm, count, 0, nbytes // way.itemsize, width)
        self.found.tensors += sum(len(one.schedule.messages) for one in made)
        self.found.nbytes += sum(one.sent(way.itemsize) for one in made)
        return bool(made)

    def _process(self, at: Coordinate) -> object:
        return process_of(self.plan.topology.device(at))


def between_processes(plan: Plan) -> Crossing | None:
    """What a plan sends between processes; None where there is one.

    Not counted: rows of tables and their new values, what travels compressed, the batch, metrics,
    what stages send, and what layers send over inner axes that cross processes.
    """
    if len({process_of(device) for device in plan.topology.devices}) == 1:
        return None
    counter = _Counter(plan)
    counter.found.beside = _beside(plan)
    fused = {n for bucket in plan.buckets for each in bucket.units for n in each}
    for bucket in plan.buckets:
        sizes = [sum(plan.unit_bytes(plan.units[n]) for n in units) for units in bucket.units]
        first = plan.weights[plan.trainable[bucket.members[0]]]
        way = Way(bucket.algorithm, first.itemsize)
        for owner, size in zip(bucket.owners, sizes, strict=True):
            if bucket.members[0] not in plan.compressed:
                counter.add_up([(s, bucket.inner) for s in first.slices], owner, size, way)
        if plan.units[bucket.units[0][0]].span is not None:
            every = sorted({at for each in bucket.holders for at in each})
            _rows(counter, bucket.owners, every, sizes, way)
            continue
        if bucket.on_host:
            members = [plan.weights[plan.trainable[v]] for v in bucket.members]
            for at, nbytes in values_from_host(bucket, members):
                counter.send(bucket.owners[0], [at], nbytes)
            continue
        for owner, holders, size in zip(bucket.owners, bucket.holders, sizes, strict=True):
            counter.send(owner, set(holders) - set(bucket.owners), size, way)
    parts: dict[tuple[int, int | None], list[UpdateUnit]] = {}
    for n, unit in enumerate(plan.units):
        if n not in fused and unit.variable not in dict(plan.look_ups):
            _unit(counter, unit, plan.weights[plan.trainable[unit.variable]])
            if unit.span is not None:
                parts.setdefault((unit.variable, unit.shard), []).append(unit)
    for units in parts.values():
        placement = plan.weights[plan.trainable[units[0].variable]]
        owners = [unit.owner for unit in units]
        sizes = [plan.unit_bytes(unit) for unit in units]
        way = Way(units[0].algorithm, placement.itemsize)
        _rows(counter, owners, placement.shards[units[0].shard or 0].holders, sizes, way)
    for gather in plan.gathers:
        group = [plan.weights[plan.params[v]] for v in gather.weights]
        _gather(counter, group, plan.topology.group(gather.stage))
    return counter.found


def _rows(
    counter: _Counter,
    owners: Sequence[Coordinate],
    holders: Sequence[Coordinate],
    sizes: Sequence[int],
    way: Way,
) -> None:
    """Rows of several owners meet on one of them, which sends the whole."""
    root = owners[0]
    for owner, size in zip(owners, sizes, strict=True):
        counter.send(owner, [root], size)
    counter.send(root, holders, sum(sizes), way)


def _unit(counter: _Counter, unit: UpdateUnit, placement: Placement) -> None:
    """What is updated apart: its gradient's sum, and its new value."""
    compressed = unit.variable in counter.plan.compressed
    if unit.shard is not None:
        nbytes = counter.plan.unit_bytes(unit)
        way = Way(unit.algorithm, placement.itemsize)
        if not compressed:
            sources = [(s, unit.owner[1]) for s in placement.slices]
            counter.add_up(sources, unit.owner, nbytes, way)
        if unit.span is None:
            holders = placement.shards[unit.shard].holders
            near = [at for at in holders if not unit.replicated or at[0] == unit.owner[0]]
            counter.send(unit.owner, near, nbytes, way)
        return
    for shard in placement.shards:
        nbytes = math.prod(shard.shape) * placement.itemsize
        if not compressed:
            inner = shard.holders[0][1]
            counter.add_up([(s, inner) for s in placement.slices], unit.owner, nbytes)
        for at in shard.holders:
            if not unit.replicated or at[0] == unit.owner[0]:
                counter.send(unit.owner, [at], nbytes)


def _gather(counter: _Counter, group: Sequence[Placement], users: Sequence[int]) -> None:
    """Weights that are gathered before use, and travel together."""
    first = group[0]
    for k in range(counter.plan.topology.inner_size):
        if first.resident is not None:
            nbytes = sum(one.stored_bytes((first.resident, k)) for one in group)
            counter.send((first.resident, k), [(s, k) for s in users], nbytes)
        elif first.data_dim is not None:
            part = sum(one.nbytes // len(one.shards) for one in group)
            for s in first.home:
                counter.send((s, k), [(user, k) for user in users], part)
