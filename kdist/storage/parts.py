"""Tensors put together from the parts that the inner coordinates of a slice hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.sharding.placement import Index, Placement
from kdist.storage.variables import assemble


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
