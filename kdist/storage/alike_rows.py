"""Rows that are looked up by the same ids in each batch, apart from those by ids of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Asked:
    """A look-up that a program makes.

    Attributes:
        size: How many indices, None if that is not known.
        same: Whether these are the same in each batch.
    """

    size: int | None
    same: bool


def arranged(
    gradient: Any,
    indices: Any,
    turns: Sequence[Any],
    known: Sequence[Mapping[int | None, Sequence[Asked]]],
) -> tuple[Any, Any]:
    """A gradient's rows and their indices: what is the same in each batch at the end, and once.

    Args:
        gradient: Rows of all look-ups, in their order.
        indices: Of these.
        turns: How many each turn looks up: a virtual stage for a micro-batch.
        known: For each of the virtual stages, its look-ups, by how many indices these have.
    """
    of_batch: list[tuple[Any, Any]] = []
    same: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
    parts = zip(*(tf.split(t, turns) for t in (gradient, indices)), strict=True)
    for turn, (rows, size) in enumerate(zip(parts, turns, strict=True)):
        number = turn % len(known)
        asked = known[number][size if isinstance(size, int) else None]
        sizes = [-1 if n.size is None else n.size for n in asked]
        pieces = zip(*(tf.split(t, sizes) for t in rows), strict=True)
        for i, (look_up, piece) in enumerate(zip(asked, pieces, strict=True)):
            (same.setdefault((number, i), []) if look_up.same else of_batch).append(piece)
    values = [values for values, _ in of_batch]
    values += [tf.add_n([values for values, _ in pieces]) for pieces in same.values()]
    found = [indices for _, indices in (*of_batch, *(p[0] for p in same.values()))]
    return tf.concat(values, 0), tf.concat(found, 0)
