"""Tensors put together from parts: those that the inner coordinates of a slice hold, say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.sharding.placement import Index, Placement, covers, overlap, relative, shape_of

import tensorflow as tf


def assemble(parts: Sequence[tuple[Index, Any]]) -> Any:
    """Joins disjoint parts that tile a box into one tensor.

    Args:
        parts: (index, tensor) pairs.

    Returns:
        The tensor of the whole box, on the device in scope.
    """
    # Of a table that is split by hand, a device may hold no row.
    some = [p for p in parts if all(one.stop > one.start for one in p[0])]
    # Where there is no element at all, equal parts are disjoint.
    parts = some or list({str(p[0]): p for p in parts}.values())
    if len(parts) == 1:
        return parts[0][1]
    rank = len(parts[0][0])
    for dim in range(rank):
        starts = sorted({index[dim].start for index, _ in parts})
        if len(starts) > 1:
            groups = [[p for p in parts if p[0][dim].start == start] for start in starts]
            return tf.concat([assemble(group) for group in groups], axis=dim)
    raise ValueError(f"Parts must be disjoint. Received: {[index for index, _ in parts]}")


def whole_of(placement: Placement, part: Callable[[int], Any]) -> Any:
    """Assembles a tensor from the distinct parts that the inner coordinates of a slice hold."""
    return assemble([(index, part(k)) for index, k in distinct_parts(placement)])


def distinct_parts(placement: Placement) -> list[tuple[Index, int]]:
    """The different parts that inner coordinates compute on, each with its first coordinate."""
    found: dict[tuple[int, ...], tuple[Index, int]] = {}
    for k in range(len(placement.table[0])):
        index = placement.inner_index(k)
        found.setdefault(tuple(i.start for i in index), (index, k))
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class InParts:
    """A tensor that is nowhere whole.

    Attributes:
        parts: Disjoint parts that tile it, with where they lie in it.
    """

    parts: Sequence[tuple[Index, Any]]

    def at(self, index: Index) -> Any:
        """What it has at `index`, cut where the parts are."""
        found = []
        for own, tensor in self.parts:
            if (both := overlap(own, index)) is not None:
                inside = relative(both, own)
                with tf.device(tensor.device):
                    cut = tensor if covers(inside, shape_of(own)) else tensor[inside]
                found.append((both, cut))
        return assemble(found) if found else tf.zeros(shape_of(index), self.parts[0][1].dtype)
