"""Compressed gradients over the data axis: what travels together, from where to where. Pure.

An exchange is the gradients of some parameters that travel in one compressed form at one inner
coordinate. There are three ways to end one:

- `"all"`: every slice gets the sum, and updates its own copy: an all-reduce. So for parameters that
  optimizer parallelism does not spread: sending new values instead would cost their full bytes.
- `"scatter"`: every slice gets its rows of the sum: a reduce-scatter.
- `"one"`: one owner gets the sum.

Sums are made on one device, the root, and sent back where all need them; together what a ring
all-reduce of the same buffers would move.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from kdist.compression import Compressor, PowerSGD, matrix_shape
from kdist.optimizer.bucket import Bucket
from kdist.placement import Coordinate, Placement, UpdateUnit, shape_of

How = Literal["all", "scatter", "one"]
Sent = dict[str, list[tuple[int, int]]]
"""What for -> per collective, its messages and the bytes of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Gradients that travel together.

    Attributes:
        members: Position of each parameter among the trainable variables.
        inner: The inner coordinate whose parts of the gradients travel.
        shapes: Of these parts.
        itemsize: Bytes of an element of the gradients.
        compressor: How they travel.
        how: Who gets the sum.
        root: Where sums are made; for `"one"` the owner.
        owner: The inner coordinate of the devices that update.
    """

    members: tuple[int, ...]
    inner: int
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    compressor: Compressor
    how: How
    root: Coordinate
    owner: int

    @property
    def elements(self) -> int:
        """Elements of all members."""
        return sum(math.prod(shape) for shape in self.shapes)

    def sent(self, replicas: int) -> Sent:
        """What crosses devices in a step.

        Args:
            replicas: Number of slices.

        Returns:
            "reduce": towards where sums are made. "share": what all must know of a sum.
        """
        low_rank = isinstance(self.compressor, PowerSGD)
        found = self._low_rank(replicas) if low_rank else self._cast(replicas)
        if self.owner != self.inner and (self.how == "all" or low_rank):
            # The sum goes on, inside the slice, to the device that updates.
            owners = replicas if self.how == "all" else 1
            sizes = [math.prod(shape) * self.itemsize for shape in self.shapes]
            found["reduce"] += [(owners, size) for size in sizes]
        return {what: [c for c in sent if c[0]] for what, sent in found.items()}

    def _cast(self, replicas: int) -> Sent:
        # An owner at another inner coordinate gets the part of its own slice, too.
        senders = replicas - (self.root[1] == self.inner)
        size = 2 * self.elements
        back = (senders, size)
        if self.how == "scatter":
            values = (replicas * (replicas - 1), size // replicas)
        else:
            values = (senders, size)
        found = {"reduce": [values], "share": [back] if self.how == "all" else []}
        if self.compressor == "fp16":
            # The largest values go to the root, the scale comes back.
            for sent in found.values():
                sent.append((senders, self.itemsize))
        return found

    def _low_rank(self, replicas: int) -> Sent:
        assert isinstance(self.compressor, PowerSGD)
        sides = [matrix_shape(shape) for shape in self.shapes]
        width = self.compressor.rank * max(self.itemsize, 4)
        factors = [(replicas - 1, width * sum(side)) for side in zip(*sides)]
        return {"reduce": list(factors), "share": list(factors)}


def on_every_slice(
    units: Sequence[UpdateUnit], replicated: Sequence[bool], replicas: int
) -> tuple[UpdateUnit, ...]:
    """Lets every slice update its own copy of some parameters.

    Args:
        units: Who updates which part.
        replicated: Per trainable variable, whether every slice is to update it. A unit of rows
            stays with its owner.
        replicas: Number of slices.
    """
    found = []
    for unit in units:
        if replicated[unit.variable] and unit.rows is None and replicas > 1:
            found += [
                dataclasses.replace(unit, owner=(s, unit.owner[1]), replicated=True)
                for s in range(replicas)
            ]
        else:
            found.append(unit)
    return tuple(found)


def make_exchanges(
    units: Sequence[UpdateUnit],
    placements: Sequence[Placement],
    compressors: Sequence[Compressor],
    keys: Sequence[Hashable | None],
    buckets: Sequence[Bucket],
) -> tuple[Exchange, ...]:
    """Groups the compressed gradients.

    Args:
        units: Who updates which part.
        placements: One per trainable variable.
        compressors: One per trainable variable.
        keys: Parameters with the same key travel together, if all slices update them.
        buckets: What travels as one vector per owner; each is an exchange.
    """
    found = [_of_bucket(b, placements, compressors, n) for n, b in enumerate(buckets)]
    fused = {n for b in buckets for numbers in b.units for n in numbers}
    groups: dict[tuple[Any, bool, Coordinate, int], list[tuple[int, tuple[int, ...]]]] = {}
    for n, unit in enumerate(units):
        if n in fused or compressors[unit.variable] == "none":
            continue
        if unit.replicated and unit.owner[0] > 0:
            continue
        for k, shape in parts_of(unit, placements[unit.variable]):
            key: Hashable = keys[unit.variable]
            if unit.replicated and key is not None:
                key = (key, placements[unit.variable].itemsize, compressors[unit.variable])
            else:
                key = ("alone", n)
            groups.setdefault((key, unit.replicated, unit.owner, k), []).append(
                (unit.variable, shape)
            )
    replicas = len(placements[0].table) if placements else 1
    for number, ((_, replicated, owner, k), members) in enumerate(groups.items()):
        first = members[0][0]
        found.append(
            Exchange(
                members=tuple(v for v, _ in members),
                inner=k,
                shapes=tuple(shape for _, shape in members),
                itemsize=placements[first].itemsize,
                compressor=compressors[first],
                how="all" if replicated else "one",
                root=(number % replicas, k) if replicated else owner,
                owner=owner[1],
            )
        )
    return tuple(e for e in found if e.compressor != "none")


def _of_bucket(
    bucket: Bucket, placements: Sequence[Placement], compressors: Sequence[Compressor], number: int
) -> Exchange:
    first = bucket.members[0]
    return Exchange(
        members=bucket.members,
        inner=bucket.inner,
        shapes=bucket.shapes,
        itemsize=placements[first].itemsize,
        compressor=compressors[first],
        how="scatter" if len(bucket.owners) > 1 else "one",
        root=bucket.owners[number % len(bucket.owners)],
        owner=bucket.inner,
    )


def parts_of(unit: UpdateUnit, placement: Placement) -> list[tuple[int, tuple[int, ...]]]:
    """The parts of a gradient that a unit's update needs: inner coordinate and shape of each."""
    if unit.shard is not None:
        index = unit.index(placement)
        return [(unit.owner[1], shape_of(index))]
    seen: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
    for k in range(len(placement.table[0])):
        index = placement.inner_index(k)
        shape = shape_of(index)
        seen.setdefault(tuple(i.start for i in index), (k, shape))
    return list(seen.values())


def check_stored(
    placements: Sequence[Placement], compressors: Sequence[Compressor], replicas: int
) -> None:
    """Refuses what cannot be compressed as asked.

    Raises:
        ValueError: Low rank for a parameter that is stored cut over the data axis; float16 sums
            over more replicas than are safe from overflow.
    """
    for placement, compressor in zip(placements, compressors):
        if isinstance(compressor, PowerSGD) and placement.gathered:
            raise ValueError(
                "Low-rank compression keeps an error of the gradient's whole size on every "
                "replica, which undoes that a parameter is stored cut over the data axis (level "
                "3, or a layout that names that axis). Use a cast for it, "
                "CompressionConfig(rest='bf16'), or at most level 2. "
                f"Received: {compressor} for {placement.path!r}"
            )
        if compressor == "fp16" and replicas > MAX_FP16:
            raise ValueError(
                f"Sums of float16 gradients are safe from overflow for up to {MAX_FP16} replicas. "
                f"Use 'bf16'. Received: 'fp16' for {placement.path!r} on {replicas} replicas"
            )


MAX_FP16 = 1024
"""See `kdist.compressors.FP16_REPLICAS`."""
