"""Slot variables of the optimizer that the user compiled, as views of its local optimizers' ones.

So `optimizer.variables`, saving, loading and callbacks see whole tensors in Keras's order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any

from kdist._compat import keras_optimizers, learning_rates
from kdist.optimizer.local import LocalOptimizer
from kdist.sharding.placement import Index, covers
from kdist.storage.flat_rows import Piece
from kdist.storage.parts import assemble
from kdist.storage.variables import Part, become_view, unborn

import keras
import numpy as np
import tensorflow as tf


class SlotParts:
    """Backing of a logical optimizer variable: local variables that tile it, or copies of it."""

    def __init__(
        self, shape: tuple[int, ...], parts: Sequence[tuple[str, Index | None, keras.Variable]]
    ) -> None:
        self.shape = shape
        self.parts = list(parts)

    def whole(self) -> Any:
        """The whole value."""
        if self.parts[0][1] is None:
            return tf.convert_to_tensor(self.parts[0][2].value)
        cut = {tuple(s.start for s in i): (i, local) for _, i, local in self.parts if i is not None}
        return assemble([(index, local.value) for index, local in cut.values()])

    def assign(self, value: Any) -> None:
        """Writes the whole value to every part."""
        for device, index, local in self.parts:
            with tf.device(device):
                part = value if index is None or covers(index, self.shape) else value[index]
                local.assign(tf.cast(part, local.dtype))

    def stored_parts(self) -> list[Part]:
        """See `kdist.storage.variables.parts_of`."""
        return [Part(device, index, local) for device, index, local in self.parts]


@dataclasses.dataclass(frozen=True)
class Span:
    """Which part of a variable a part of a local optimizer's variable stands for.

    Attributes:
        position: Of the variable in the logical optimizer's list.
        index: The part of it, None for all.
        start: First element, where the local variable is the vector of a bucket; else None.
        shape: Shape of the part.
    """

    position: int
    index: Index | None
    start: int | None
    shape: tuple[int, ...]


def link_slots(
    logical: Any,
    local: Sequence[LocalOptimizer],
    spans: Sequence[Sequence[Span]],
) -> None:
    """Turns the logical optimizer's variables into views of the local ones, keeping their values.

    State of variables that are frozen stays as it is.

    Args:
        logical: A built optimizer.
        local: Its local optimizers.
        spans: Per position of the local optimizers, what it stands for.

    Raises:
        RuntimeError: A variable of the optimizer is neither per-variable state nor a scalar, so
            that it cannot be mapped.
    """
    views: dict[int, tuple[keras.Variable, list]] = {}

    def add(variable: keras.Variable, device: str, index: Index | None, part: Any) -> None:
        views.setdefault(id(variable), (variable, []))[1].append((device, index, part))

    whole_families = keras_optimizers.families(logical)
    for one in local:
        mine = keras_optimizers.families(one.optimizer)
        for name, slots in whole_families.items():
            for j, position in enumerate(one.positions):
                for span in spans[position]:
                    slot = slots[span.position]
                    part = None if slot is None else mine[name][j]
                    if part is None:
                        continue
                    if span.start is not None:
                        part = Piece(part, span.start, span.shape)
                    add(slot, one.device, span.index, part)
        own = keras_optimizers.scalars(one.optimizer)
        for name, variable in keras_optimizers.scalars(logical).items():
            add(variable, one.device, None, own[name])
    trained = {span.position for one in local for n in one.positions for span in spans[n]}
    _refuse_unmapped(logical, views, trained)
    vectors = Vectors()
    for variable, parts in views.values():
        backing = SlotParts(tuple(variable.shape), _distinct(parts))
        source = unborn(variable)
        value = np.asarray(tf.convert_to_tensor(variable.value)) if not source else source.given
        if value is None:  # never written: it begins as its parts do
            become_view(variable, backing, None)
            continue
        for device, index, target in backing.parts:
            values = value if index is None else value[index]
            if isinstance(target, Piece):
                vectors.put(device, target, values)
            else:
                with tf.device(device):
                    target.assign(values)
        become_view(variable, backing, None)
    vectors.finish()


def _refuse_unmapped(logical: Any, mapped: Container[int], trained: Container[int]) -> None:
    """Refuses state that is not mapped, but for that of variables which do not train."""
    frozen = {
        id(slot)
        for slots in keras_optimizers.families(logical).values()
        for position, slot in enumerate(slots)
        if position not in trained
    }
    for variable in logical.variables:
        known = id(variable) in mapped or id(variable) in frozen
        if not known and not learning_rates.is_rate_of(logical, variable):
            raise RuntimeError(
                "kdist maps optimizer state by attributes that hold one variable per parameter, "
                "or one scalar variable. Make it so, or use one of Keras's optimizers. "
                f"Received: {type(logical).__name__} with variable {variable.path!r}"
            )


class Vectors:
    """Writes vectors of buckets once all their pieces are there.

    A piece alone is written by reading the vector and putting it together anew.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, tuple[str, Piece, Any]]] = {}

    def put(self, device: str, piece: Piece, value: Any) -> None:
        """Takes a piece's value."""
        found = self._pieces.setdefault(id(piece.flat), {})
        found[piece.start] = device, piece, value
        if sum(one.size for *_, one in found.values()) == math.prod(piece.flat.shape):
            with tf.device(device):
                piece.flat.assign(np.concatenate([found[n][2].ravel() for n in sorted(found)]))
            del self._pieces[id(piece.flat)]

    def finish(self) -> None:
        """Writes pieces of vectors that have others."""
        for found in self._pieces.values():
            for device, piece, value in found.values():
                with tf.device(device):
                    piece.assign(value)


def _distinct(parts: list) -> list:
    """All parts are written; those that several slices keep are read once."""
    return sorted(parts, key=lambda p: tuple(s.start for s in p[1]) if p[1] is not None else ())
