"""Buckets of parameters cut over the replicas: their shards travel, and are updated, as one.

A replica's part of a bucket is one flat vector: the rows that it owns of each member, one after the
other. Reducing gradients is one message per pair of devices, the optimizer's arithmetic one set of
operations per device, whatever the number of parameters.

```
bucket of (4, 2) and (2, 3) over 2 replicas        as a matrix, one row per replica
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

from kdist import _private
from kdist.placement import Coordinate, Placement, UpdateUnit
from kdist.variables import become_view, make_local

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Parameters whose shards are one vector per replica.

    Attributes:
        members: Position of each parameter among the trainable variables.
        units: Per slice, the update unit of each member.
        inner: The inner coordinate of the owners.
        copies: Inner coordinates that hold the members' values.
        shapes: What an inner coordinate computes with, per member.
    """

    members: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    inner: int
    copies: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each member in one replica's vector."""
        return [math.prod(shape) // len(self.units) for shape in self.shapes]

    def matrix(self, tensors: Sequence[Any]) -> Any:
        """Tensors of the members, dense, as a matrix with one row per replica."""
        rows = [tf.reshape(t, [len(self.units), -1]) for t in tensors]
        return rows[0] if len(rows) == 1 else tf.concat(rows, 1)

    def split(self, matrix: Any) -> list[Any]:
        """The reverse of `matrix`."""
        parts = [matrix] if len(self.shapes) == 1 else tf.split(matrix, self.sizes, axis=1)
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes)]


def make_buckets(
    units: Sequence[UpdateUnit],
    placements: Sequence[Placement],
    keys: Sequence[Hashable | None],
    replicas: int,
) -> list[Bucket]:
    """Groups the updates of cut parameters.

    Args:
        units: Who updates which part.
        placements: One per trainable parameter.
        keys: Parameters with the same key share a bucket, if they are held alike; None keeps one
            out.
        replicas: Number of slices.
    """
    families: dict[tuple[int, int], list[int]] = {}
    for n, unit in enumerate(units):
        spread = unit.rows is not None or placements[unit.variable].data_dim == 0
        if keys[unit.variable] is not None and spread and unit.shard is not None:
            families.setdefault((unit.variable, unit.owner[1]), []).append(n)
    groups: dict[Any, list[tuple[int, list[int]]]] = {}
    for (variable, inner), numbers in families.items():
        numbers.sort(key=lambda n: units[n].owner[0])
        if [units[n].owner[0] for n in numbers] != list(range(replicas)):
            continue
        shard = placements[variable].shards[units[numbers[0]].shard or 0]
        copies = tuple(sorted({k for _, k in shard.holders}))
        groups.setdefault((keys[variable], inner, copies), []).append((variable, numbers))
    found = []
    for (_, inner, copies), members in groups.items():
        variables = tuple(v for v, _ in members)
        shapes = tuple(
            tuple(i.stop - i.start for i in placements[v].inner_index(inner)) for v in variables
        )
        found.append(Bucket(variables, tuple(zip(*(n for _, n in members))), inner, copies, shapes))
    return found


class FlatRows:
    """Backing of a replica's vector of a bucket: the rows are read and written where they lie.

    Args:
        parts: Per member, its local variable and the rows of it (None for all).
    """

    def __init__(self, parts: Sequence[tuple[keras.Variable, slice | None]]) -> None:
        self.parts = list(parts)
        self._known: tuple[Any, Any] | None = None

    def whole(self) -> Any:
        """The vector. Within one graph it is put together once after each write."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph is not None and self._known is not None and self._known[0] is graph:
            return self._known[1]
        rows = [local.value if r is None else local.value[r] for local, r in self.parts]
        vector = tf.concat([tf.reshape(row, [-1]) for row in rows], 0)
        self._known = None if graph is None else (graph, vector)
        return vector

    def assign(self, value: Any) -> None:
        """Writes the vector."""
        shapes = [_rows_shape(local, r) for local, r in self.parts]
        pieces = tf.split(tf.cast(value, self.parts[0][0].dtype), [math.prod(s) for s in shapes])
        for (local, r), piece, shape in zip(self.parts, pieces, shapes):
            target = _private.tf_variable(local)
            if r is None:
                target.assign(tf.reshape(piece, shape))
            else:
                target[r].assign(tf.reshape(piece, shape))
        self._known = None

    def forget(self) -> None:
        """Others have written."""
        self._known = None


def _rows_shape(local: keras.Variable, rows: slice | None) -> tuple[int, ...]:
    shape = tuple(int(n) for n in local.shape)
    return shape if rows is None else (rows.stop - rows.start, *shape[1:])


def flat_view(
    like: keras.Variable, parts: Sequence[tuple[keras.Variable, slice | None]]
) -> keras.Variable:
    """A variable that is a replica's vector of a bucket, on the device in scope.

    Args:
        like: A member, for its path.
        parts: See `FlatRows`.
    """
    size = sum(math.prod(_rows_shape(local, rows)) for local, rows in parts)
    view = make_local(like, tf.zeros([size], parts[0][0].dtype))
    become_view(view, FlatRows(parts), None)
    return view


class Piece:
    """A part of a flat variable, in the shape of what it stands for.

    Args:
        flat: The variable.
        start: First element.
        shape: Shape of the part.
    """

    def __init__(self, flat: keras.Variable, start: int, shape: Sequence[int]) -> None:
        self.flat = flat
        self.start = start
        self.shape = tuple(shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the variable."""
        return self.flat.dtype

    @property
    def value(self) -> Any:
        """The part."""
        stop = self.start + math.prod(self.shape)
        return tf.reshape(tf.convert_to_tensor(self.flat.value)[self.start : stop], self.shape)

    def assign(self, value: Any) -> None:
        """Writes the part."""
        stop = self.start + math.prod(self.shape)
        whole = tf.convert_to_tensor(self.flat.value)
        middle = tf.reshape(tf.cast(value, whole.dtype), [-1])
        self.flat.assign(tf.concat([whole[: self.start], middle, whole[stop:]], 0))


def owner(bucket: Bucket, s: int) -> Coordinate:
    """Which device has slice `s`'s vector."""
    return s, bucket.inner
