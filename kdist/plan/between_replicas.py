"""What replicas send to each other in a step, outside of layers. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from kdist.plan.bucket import Bucket, values_from_host
from kdist.plan.traffic import Count, Traffic
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, Placement

if TYPE_CHECKING:
    from kdist.plan.plan import Plan


def between_replicas(plan: Plan) -> list[Traffic]:
    """Each kind of communication, summed over all devices; see `Plan.traffic`."""
    topology, counter = plan.topology, _Counter(plan)
    inner = " x ".join(axis for axis, _ in topology.inner_axes)
    axis = topology.data_axis or inner or "-"
    counter.count_updates()
    counter.count_gathers()
    for exchange in plan.exchanges:
        for what, collectives in exchange.sent().items():
            for messages, size in collectives:
                counter.counts[what].add([(messages, size)])
    return [
        Traffic(k, axis, c.collectives, c.messages, c.nbytes, c.joined)
        for k, c in counter.counts.items()
        if c.messages
    ]


class _Counter:
    """Adds up what a plan sends.

    Args:
        plan: The plan.

    Attributes:
        counts: By what it is for; see `Traffic`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        kinds = ("reduce", "share", "join", "broadcast", "gather")
        self.counts = {what: Count() for what in kinds}

    def count_updates(self) -> None:
        """Gradients, and the values that they lead to."""
        plan = self.plan
        fused = {n for bucket in plan.buckets for each in bucket.units for n in each}
        for bucket in plan.buckets:
            self._count_bucket(bucket)
        rows: dict[Hashable, list[UpdateUnit]] = {}
        for n, unit in enumerate(plan.units):
            if n not in fused:
                self._count_unit(unit)
                if unit.span is not None and unit.variable not in plan.changed_by_rows:
                    rows.setdefault((unit.variable, unit.shard), []).append(unit)
        for parts in rows.values():
            placement = self._trained(parts[0].variable)
            holders = placement.shards[parts[0].shard or 0].holders
            self._count_rows([plan.unit_bytes(unit) for unit in parts], len(holders))

    def count_gathers(self) -> None:
        """What is not stored whole, and is before it is used: once a step, but for parameters."""
        plan, params = self.plan, set(self.plan.params)
        for i, one in enumerate(plan.weights):
            if i not in params:
                self._count_gather([one], one.slices)
        for gather in plan.gathers:
            group = [plan.weights[plan.params[v]] for v in gather.weights]
            self._count_gather(group, plan.topology.group(gather.stage))

    def _trained(self, variable: int) -> Placement:
        return self.plan.weights[self.plan.trainable[variable]]

    def _count_bucket(self, bucket: Bucket) -> None:
        plan, counts = self.plan, self.counts
        sizes = [sum(plan.unit_bytes(plan.units[n]) for n in units) for units in bucket.units]
        members = [self._trained(v) for v in bucket.members]
        others = len(members[0].slices) - (not bucket.on_host)
        if bucket.members[0] not in plan.compressed:
            counts["reduce"].add([(others, size) for size in sizes])
        if plan.units[bucket.units[0][0]].span is not None:
            self._count_rows(sizes, len({at for h in bucket.holders for at in h}))
            return
        if bucket.on_host:
            values = values_from_host(bucket, members)
            counts["broadcast"].add([(1, nbytes) for _, nbytes in values])
            return
        holders = [len(set(h) - {o}) for h, o in zip(bucket.holders, bucket.owners)]
        counts["broadcast"].add(list(zip(holders, sizes)))

    def _count_rows(self, sizes: Sequence[int], holders: int) -> None:
        """Rows of several owners are put together on one of them, and sent from there."""
        self.counts["join"].add([(1, size) for size in sizes[1:]], joined=True)
        self.counts["broadcast"].add([(holders - 1, sum(sizes))], joined=True)

    def _count_unit(self, unit: UpdateUnit) -> None:
        plan, placement = self.plan, self._trained(unit.variable)
        travels = unit.variable not in plan.compressed
        travels = travels and unit.variable not in dict(plan.look_ups)
        if unit.shard is not None:
            shards = [placement.shards[unit.shard]]
            parts = [(len(placement.slices) - 1, plan.unit_bytes(unit))]
        else:
            shards = list(placement.shards)
            parts = [(int(at != unit.owner), n) for at, n in inner_parts(placement)]
        if travels:
            self.counts["reduce"].add(parts)
        if unit.span is not None or unit.variable in plan.changed_by_rows:
            return
        values = []
        for shard in shards:
            near = [c for c in shard.holders if not unit.replicated or c[0] == unit.owner[0]]
            nbytes = math.prod(shard.shape) * placement.itemsize
            values.append((sum(c != unit.owner for c in near), nbytes))
        self.counts["broadcast"].add(values)

    def _count_gather(self, group: Sequence[Placement], users: Sequence[int]) -> None:
        """Weights that travel together are held by the same devices.

        Args:
            group: The weights.
            users: The slices that get them.
        """
        first, size = group[0], self.plan.topology.inner_size
        if first.resident is not None:
            others = set(users) - {first.resident}
            sizes = [sum(p.stored_bytes((first.resident, k)) for p in group) for k in range(size)]
            self.counts["gather"].add([(len(others), nbytes) for nbytes in sizes])
        if first.data_dim is not None:
            part = sum(p.nbytes // len(p.shards) for p in group)
            pairs = sum(s != user for user in users for s in first.home)
            self.counts["gather"].add([(pairs * size, part)])


def inner_parts(placement: Placement) -> list[tuple[Coordinate, int]]:
    """Which coordinates send the parts of a gradient that some device needs whole.

    Returns:
        Per slice and distinct part over the inner axes, the first coordinate that has it, and its
        bytes.
    """
    parts = []
    for s in placement.slices:
        numbers = placement.table[s]
        seen = set()
        for k in range(len(numbers)):
            index = placement.inner_index(k)
            if (key := tuple(i.start for i in index)) not in seen:
                seen.add(key)
                nbytes = math.prod(i.stop - i.start for i in index) * placement.itemsize
                parts.append(((s, k), nbytes))
    return parts
