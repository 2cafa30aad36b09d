"""Compressed gradients over the data axis: what travels together, from where to where. Pure.

An exchange is the gradients of some parameters that travel in one compressed form at one inner
coordinate, between the slices that compute with them: all, or those of a pipeline's stages. There
are three ways to end one:

- `"all"`: every slice gets the sum, and updates its own copy: an all-reduce. So for parameters that
  optimizer parallelism does not spread: sending new values instead would cost their full bytes.
- `"scatter"`: every owner gets its part of the sum: a reduce-scatter.
- `"one"`: one owner gets the sum.

Sums are made on one device, the root, and sent back where all need them; together what a ring
all-reduce of the same buffers would move.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Literal

from kdist.config.compression import Compressor, PowerSGD, matrix_shape
from kdist.plan.bucket import Bucket
from kdist.sharding.mesh import HOST
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, Group, Placement, shape_of

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
        slices: Whose gradients are added.
        root: Where sums are made; for `"one"` the owner.
        owner: The inner coordinate of the devices that update.
        owners: For `"scatter"`, in how many parts the sum is needed.
    """

    members: tuple[int, ...]
    inner: int
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    compressor: Compressor
    how: How
    slices: Group
    root: Coordinate
    owner: int
    owners: int = 1

    @property
    def elements(self) -> int:
        """Elements of all members."""
        return sum(math.prod(shape) for shape in self.shapes)

    def sent(self) -> Sent:
        """What crosses devices in a step.

        Returns:
            "reduce": towards where sums are made. "share": what all must know of a sum.
        """
        low_rank = is_low_rank(self.compressor)
        found = self._low_rank() if low_rank else self._cast()
        if self.owner != self.inner and (self.how == "all" or low_rank):
            # The sum goes on, inside the slice, to the device that updates.
            owners = len(self.slices) if self.how == "all" else 1
            sizes = [math.prod(shape) * self.itemsize for shape in self.shapes]
            found["reduce"] += [(owners, size) for size in sizes]
        return {what: [c for c in sent if c[0]] for what, sent in found.items()}

    def _cast(self) -> Sent:
        # An owner at another inner coordinate gets the part of its own slice, too.
        senders = len(self.slices) - (self.root[1] == self.inner and self.root != HOST)
        size = 2 * self.elements
        back = (senders, size)
        values = (senders * self.owners, size // self.owners)
        found = {"reduce": [values], "share": [back] if self.how == "all" else []}
        if self.compressor == "fp16":
            # The largest values go to the root, the scale comes back.
            for sent in found.values():
                sent.append((senders, self.itemsize))
        return found

    def _low_rank(self) -> Sent:
        assert isinstance(self.compressor, PowerSGD)
        sides = [matrix_shape(shape) for shape in self.shapes]
        width = self.compressor.rank * max(self.itemsize, 4)
        factors = [(len(self.slices) - 1, width * sum(side)) for side in zip(*sides)]
        return {"reduce": list(factors), "share": list(factors)}


def on_every_slice(
    units: Sequence[UpdateUnit], replicated: Sequence[bool], placements: Sequence[Placement]
) -> tuple[UpdateUnit, ...]:
    """Lets every slice that uses some parameters update its own copy of them.

    Args:
        units: Who updates which part.
        replicated: Per trainable variable, whether every slice is to update it. A unit of rows
            stays with its owner.
        placements: One per trainable variable.
    """
    found = []
    for unit in units:
        slices = placements[unit.variable].slices
        if replicated[unit.variable] and unit.span is None and len(slices) > 1:
            found += [
                dataclasses.replace(unit, owner=(s, unit.owner[1]), replicated=True) for s in slices
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
    groups: dict[_Route, dict[int, tuple[int, ...]]] = {}
    for n, unit in enumerate(units):
        placement, compressor = placements[unit.variable], compressors[unit.variable]
        if n in fused or compressor == "none":
            continue
        if unit.replicated and unit.owner[0] != placement.slices[0]:
            continue
        key: Hashable = keys[unit.variable]
        if unit.replicated and key is not None:
            key = (key, placement.itemsize, compressor)
        else:
            key = ("alone", n)
        if unit.shard is not None and placement.data_dim is not None and is_low_rank(compressor):
            # One matrix, whatever part of it each owner needs.
            k = unit.owner[1]
            route = _Route("scatter", ("alone", unit.variable), placement.slices, None, k)
            groups.setdefault(route, {})[unit.variable] = shape_of(placement.inner_index(k))
            continue
        how: How = "all" if unit.replicated else "one"
        for k, shape in parts_of(unit, placement):
            route = _Route(how, key, placement.slices, unit.owner, k)
            groups.setdefault(route, {})[unit.variable] = shape
    for number, (route, members) in enumerate(groups.items()):
        first = next(iter(members))
        turn = route.slices[number % len(route.slices)], route.inner
        found.append(
            Exchange(
                members=tuple(members),
                inner=route.inner,
                shapes=tuple(members.values()),
                itemsize=placements[first].itemsize,
                compressor=compressors[first],
                how=route.how,
                slices=route.slices,
                root=route.owner if route.how == "one" and route.owner else turn,
                owner=route.owner[1] if route.owner else route.inner,
            )
        )
    return tuple(e for e in found if e.compressor != "none")


@dataclasses.dataclass(frozen=True)
class _Route:
    """What gradients outside of buckets have in common if they travel together."""

    how: How
    key: Hashable
    slices: Group
    owner: Coordinate | None
    inner: int


def is_low_rank(compressor: Compressor) -> bool:
    """Whether gradients travel as factors, not as casts."""
    return isinstance(compressor, PowerSGD)


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
        slices=placements[first].slices,
        root=bucket.owners[number % len(bucket.owners)],
        owner=bucket.inner,
        owners=len(bucket.owners),
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


def check_replicas(placements: Sequence[Placement], compressors: Sequence[Compressor]) -> None:
    """Refuses sums that may overflow.

    Raises:
        ValueError: Float16 over more slices than are safe.
    """
    for placement, compressor in zip(placements, compressors):
        if compressor == "fp16" and len(placement.slices) > MAX_FP16:
            raise ValueError(
                f"Sums of float16 gradients are safe from overflow for up to {MAX_FP16} replicas. "
                f"Use 'bf16'. Received: 'fp16' for {placement.path!r} on "
                f"{len(placement.slices)} replicas"
            )


MAX_FP16 = 1024
"""See `kdist.optimizer.compressors.FP16_REPLICAS`."""
