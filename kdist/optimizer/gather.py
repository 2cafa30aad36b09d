"""Gathering parameters that are stored sliced over the data axis, for the chunk that uses them.

Parameters of one chunk that share a bucket travel as one message per pair of devices, as their
gradients do: see `kdist.plan.fusion_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate, Placement, shape_of
from kdist.storage.flat_rows import flat, unflat
from kdist.storage.parts import assemble
from kdist.storage.transfer import Sent
from kdist.storage.variables import Stored

import tensorflow as tf

Places = Sequence[Sequence[Coordinate]]
"""Per slice of a program and device of it, which coordinate of the mesh that is."""


def gather_groups(
    positions: Sequence[int], keys: Sequence[Hashable | None], placements: Sequence[Placement]
) -> list[tuple[int, ...]]:
    """Which of the parameters that a chunk gathers travel together.

    Args:
        positions: Of the parameters, in the order of their use.
        keys: Of every parameter's bucket, None where it travels alone.
        placements: Of every parameter.
    """
    groups: dict[Hashable, list[int]] = {}
    for position in positions:
        placement, key = placements[position], keys[position]
        holders = tuple(shard.holders for shard in placement.shards)
        together = ("alone", position) if key is None else (key, placement.itemsize, holders)
        groups.setdefault(together, []).append(position)
    return [tuple(group) for group in groups.values()]


class Gatherer:
    """Gathers parameters on all slices.

    Args:
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh.
        devices: Where each slice computes: one device takes whole parameters, the devices of a
            slice with inner axes the parts that their layouts say.
        keys: See `gather_groups`.
    """

    def __init__(
        self,
        entries: Sequence[Stored],
        topology: Topology,
        devices: Sequence[Sequence[str]],
        keys: Sequence[Hashable | None],
    ) -> None:
        self.entries = list(entries)
        self.topology = topology
        self.devices = list(devices)
        self.keys = list(keys)

    def groups(self, positions: Sequence[int]) -> list[tuple[int, ...]]:
        """See `gather_groups`."""
        return gather_groups(positions, self.keys, [one.placement for one in self.entries])

    def __call__(
        self,
        positions: Sequence[int],
        gates: Sequence[Sequence[Any]],
        slices: Sequence[int] | None = None,
    ) -> list[dict[int, list[Any]]]:
        """Gathers some parameters.

        A part is sent when its own slice gets to where it uses the same parameter. So no slice is
        sent parts of chunks that it is far from: who needs parts of all slices waits for the
        slowest. A parameter that one slice has is sent when all get there.

        Args:
            positions: Of the parameters.
            gates: Per slice, the operations that it is to wait for.
            slices: Who gets them; None: all that use them.

        Returns:
            Per slice and position, what each of the slice's devices computes with.
        """
        found: list[dict[int, list[Any]]] = [{} for _ in self.devices]
        for group in self.groups(positions):
            sources = [self._sources(group[0], k) for k in range(len(self.devices[0]))]
            every = dict.fromkeys(at for wanted in sources for at in wanted)
            sent = {at: self._sent(group, at, gates) for at in every}
            for s in self.entries[group[0]].placement.slices if slices is None else slices:
                devices = self.devices[s]
                parts: list[list[Any]] = []
                for device, wanted in zip(devices, sources, strict=True):
                    with tf.device(device), tf.control_dependencies(gates[s]):
                        here = {at: sent[at].at(device) for at in wanted}
                        parts.append(self._received(group, wanted, here))
                found[s].update((v, list(one)) for v, one in zip(group, zip(*parts, strict=True)))
        return found

    def _sources(self, position: int, k: int) -> list[Coordinate]:
        """Who has the parts that a slice's device `k` computes with."""
        placement = self.entries[position].placement
        if len(self.devices[0]) < self.topology.inner_size:
            return [shard.holders[0] for shard in placement.shards]
        if placement.data_dim is None:
            return [(placement.home[0] if placement.resident is None else placement.resident, k)]
        return [(s, k) for s in placement.home]

    def _sent(self, group: Sequence[int], at: Coordinate, gates: Sequence[Sequence[Any]]) -> Sent:
        """What a coordinate sends of some parameters, as one tensor."""
        alone = self.entries[group[0]].placement.resident is not None
        waits = dict.fromkeys(op for one in gates for op in one) if alone else gates[at[0]]
        device = self.entries[group[0]].device(at)
        with tf.device(device), tf.control_dependencies(list(waits)):
            values = [tf.identity(self.entries[v].locals[at].value) for v in group]
            return Sent(values[0] if len(values) == 1 else flat(values), device)

    def _received(self, group: Sequence[int], wanted: Sequence[Coordinate], sent: Any) -> list[Any]:
        """The parameters of a group, put together on the device in scope."""
        pieces: list[list[Any]] = [[] for _ in group]
        for at in wanted:
            indices = [self.entries[v].placement.shard_at(at).index for v in group]
            tensors = [sent[at]]
            if len(group) > 1:
                shapes = [shape_of(index) for index in indices]
                assert int(sent[at].shape[0]) == sum(map(math.prod, shapes))
                tensors = unflat(sent[at], shapes)
            for mine, index, tensor in zip(pieces, indices, tensors, strict=True):
                mine.append((index, tensor))
        # One in one part still arrives when it is its turn.
        return [tf.identity(p[0][1]) if len(p) == 1 else assemble(p) for p in pieces]


def placed(gather: Gatherer, places: Places) -> Callable:
    """A gatherer as programs see the mesh whose slices are not those that store the parameters.

    Args:
        gather: Gathers on the slices that store them.
        places: Where the programs' devices are.
    """

    def gathered(
        positions: Sequence[int], gates: Sequence[Sequence[Any]]
    ) -> list[dict[int, list[Any]]]:
        program = {s: n for n, devices in enumerate(places) for s, _ in devices}
        found = gather(positions, [gates[program[s]] for s in sorted(program)])
        return [{i: [found[s][i][k] for s, k in devices] for i in positions} for devices in places]

    return gathered
