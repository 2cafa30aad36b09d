"""Buckets: the gradients of several parameters travel, and may be updated, as one vector.

A bucket has one vector per owner. Parameters cut over the replicas have an owner in each: its
vector has the part that it owns of each member, one after the other, rows as a rule. Other
parameters of a bucket have one owner. Reducing gradients is one message per pair of devices, and
the arithmetic of an element-wise optimizer one set of operations per owner, whatever the number of
parameters.

```
bucket of (4, 2) and (2, 3) over 2 replicas        as a matrix, one row per owner
  a a | b b b                                        a a a a | b b b     -> replica 0
  a a |                                              A A A A | B B B     -> replica 1
  A A | B B B
  A A |
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

from kdist.sharding.mesh import HOST
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, Index, Placement, Shard, covers, shape_of
from kdist.storage.flat_rows import flat, reshaped, unflat

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are one vector per owner.

    Attributes:
        members: Position of each parameter among the trainable variables.
        units: Per owner, the number of the update unit of each member.
        owners: Who updates each vector; all at one inner coordinate.
        holders: Per owner, every coordinate that stores what it updates; of the host, any part of
            that.
        shapes: What an inner coordinate computes with, per member.
        flat: The optimizer sees a vector, not its parts; never on the host.
        dims: Which dim of each member its owners share.
        algorithm: How sums and new values go between processes.
    """

    members: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    owners: tuple[Coordinate, ...]
    holders: tuple[tuple[Coordinate, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: bool
    dims: tuple[int, ...]
    algorithm: str = "direct"

    @property
    def inner(self) -> int:
        """The inner coordinate of the owners."""
        return self.owners[0][1]

    @property
    def sizes(self) -> list[int]:
        """Elements of each member in one vector."""
        return [math.prod(shape) // len(self.owners) for shape in self.shapes]

    def matrix(self, tensors: Sequence[Any]) -> Any:
        """Tensors of the members, dense, as a matrix with one row per owner."""
        rows = [
            reshaped(self._owners_first(t, shape, dim), [len(self.owners), -1])
            for t, shape, dim in zip(tensors, self.shapes, self.dims, strict=True)
        ]
        return rows[0] if len(rows) == 1 else tf.concat(rows, 1)

    def _owners_first(self, tensor: Any, shape: tuple[int, ...], dim: int) -> Any:
        """A tensor with its owners' parts one after the other."""
        if dim == 0:
            return tensor
        before, size = math.prod(shape[:dim]), shape[dim] // len(self.owners)
        parts = reshaped(tensor, [before, len(self.owners), size * math.prod(shape[dim + 1 :])])
        return tf.transpose(parts, [1, 0, 2])

    def messages(self, tensors: Sequence[Any]) -> list[Any]:
        """What goes to each owner."""
        if len(self.owners) == 1:
            return [flat(tensors)]
        return tf.unstack(self.matrix(tensors), len(self.owners))

    @property
    def on_host(self) -> bool:
        """Whether the host updates its members, of which it has copies."""
        return self.owners == (HOST,)

    def split(self, matrix: Any) -> list[Any]:
        """The reverse of `matrix`."""
        parts = [matrix] if len(self.shapes) == 1 else tf.split(matrix, self.sizes, axis=1)
        return [
            self._back(part, shape, dim) for part, shape, dim in zip(parts, self.shapes, self.dims)
        ]

    def _back(self, part: Any, shape: tuple[int, ...], dim: int) -> Any:
        """The reverse of `_owners_first`."""
        if dim:
            size = math.prod(shape[dim:]) // len(self.owners)
            part = tf.transpose(reshaped(part, [len(self.owners), -1, size]), [1, 0, 2])
        return reshaped(part, shape)

    def pieces(self, vector: Any) -> list[Any]:
        """The members' parts of one owner's vector."""
        indices = [self.part(0, shape, dim) for shape, dim in zip(self.shapes, self.dims)]
        return unflat(vector, [shape_of(index) for index in indices])

    def part(self, owner: int, shape: Sequence[int], dim: int) -> Index:
        """What an owner, by number, has of a member of a shape, whose owners share a dim."""
        index = [slice(0, n) for n in shape]
        if index:
            size = shape[dim] // len(self.owners)
            index[dim] = slice(owner * size, (owner + 1) * size)
        return tuple(index)


def make_buckets(
    units: Sequence[UpdateUnit],
    placements: Sequence[Placement],
    keys: Sequence[Hashable | None],
    whole: Sequence[bool],
) -> list[Bucket]:
    """Groups update units that can travel as one vector per owner.

    A unit with one owner and no company stays out: it is a vector already.

    Args:
        units: Who updates which part.
        placements: One per trainable parameter.
        keys: Parameters with the same key share a bucket, if they are held and owned alike; None
            keeps one out.
        whole: Per parameter, whether its update must see the tensor as it is.
    """
    families: dict[Any, list[int]] = {}
    for n, unit in enumerate(units):
        if keys[unit.variable] is None or unit.replicated:
            continue
        if unit.shard is None:
            if unit.owner == HOST and _computed_whole(placements[unit.variable]):
                families[unit.variable, False, None] = [n]
            continue
        spread = unit.span is not None or placements[unit.variable].data_dim is not None
        part = unit.owner[1] if spread else unit.shard
        families.setdefault((unit.variable, spread, part), []).append(n)
    groups: dict[Any, list[list[int]]] = {}
    for (variable, spread, _), numbers in families.items():
        numbers.sort(key=lambda n: units[n].owner[0])
        owners = tuple(units[n].owner for n in numbers)
        if spread and tuple(s for s, _ in owners) != placements[variable].home:
            continue
        shards = placements[variable].shards
        holders = tuple(shards[units[n].shard or 0].holders for n in numbers)
        if owners == (HOST,):
            holders = (tuple(at for shard in shards for at in shard.holders),)
        ways = tuple(units[n].algorithm for n in numbers)
        key = (keys[variable], owners, holders, whole[variable], ways)
        groups.setdefault(key, []).append(numbers)
    found = []
    for (_, owners, holders, flat_not, _), members in groups.items():
        if len(owners) == 1 == len(members):
            continue
        variables = tuple(units[numbers[0]].variable for numbers in members)
        shapes = tuple(shape_of(placements[v].inner_index(owners[0][1])) for v in variables)
        each = tuple(zip(*members))
        alone = flat_not or owners == (HOST,)
        how = units[members[0][0]].algorithm
        dims = tuple(placements[v].data_dim or units[n[0]].dim for v, n in zip(variables, members))
        found.append(Bucket(variables, each, owners, holders, shapes, not alone, dims, how))
    return found


def _computed_whole(placement: Placement) -> bool:
    """Whether each replica computes with the whole parameter, wherever it is stored."""
    return covers(placement.inner_index(0), placement.shape)


def shards_at(placements: Sequence[Placement], at: Coordinate) -> list[Shard]:
    """The part of each of some parameters that a holder stores."""
    return [next(one for one in p.shards if at in one.holders) for p in placements]


def values_from_host(
    bucket: Bucket, placements: Sequence[Placement]
) -> list[tuple[Coordinate, int]]:
    """Per holder of a bucket that the host updates, the bytes of its new values."""
    return [
        (
            at,
            sum(
                math.prod(shard.shape) * p.itemsize
                for p, shard in zip(placements, shards_at(placements, at))
            ),
        )
        for at in bucket.holders[0]
    ]
