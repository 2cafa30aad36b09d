"""Tensors put together from the parts that the inner coordinates of a slice hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.sharding.placement import Index, Placement, covers, overlap, relative, shape_of
from kdist.storage.variables import assemble

import tensorflow as tf


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
