"""Sizes that a trace does not know, with examples of what they may be.

A step that serves batches of many shapes is traced with unknown dims. DTensor wants to know them,
so it is shown examples (`kdist.dtensor.lifting`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Shape = tuple[int | None, ...]
Shapes = tuple[tuple[int, ...], ...]
"""A shape for each example."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """What a tensor of unknown shape may be.

    Attributes:
        shapes: Its shape in each example.
        probes: Its shape, as far as that is known, at sizes far from these.
        values: Its value, if it is a few integers that follow from sizes: DTensor wants to know
            them, wherever they come from.
    """

    shapes: Shapes
    probes: tuple[Shape, ...]
    values: tuple[np.ndarray, ...] | None = dataclasses.field(default=None, compare=False)


class CannotLift(Exception):
    """A program for one shape cannot become one for several; carries why."""


@dataclasses.dataclass(frozen=True)
class Multiples:
    """What sizes that change are multiples of.

    Attributes:
        rows: Rows of each part of the batch.
        others: All other sizes.
    """

    rows: int = 1
    others: int = 1

    def of(self, rows: bool) -> int:
        """What rows, or other sizes, are multiples of."""
        return self.rows if rows else self.others


@dataclasses.dataclass
class Findings:
    """What tracing finds out about sizes.

    Attributes:
        bounded: Whether the graph may be wrong for sizes beyond those of the examples: some size
            that follows from them (a tenth of a length, rounded) is the same in all of them.
        needs: What sizes have to be multiples of, because a dim of unknown size is cut.
    """

    bounded: bool = False
    needs: Multiples = dataclasses.field(default_factory=Multiples)


@dataclasses.dataclass(frozen=True)
class TracedSizes:
    """What is known of the sizes of the step that is being traced.

    Attributes:
        leaves: What each tensor of the batch may be.
        multiples: What sizes that change are multiples of.
        findings: What tracing found out.
    """

    leaves: tuple[Examples, ...]
    multiples: Multiples = Multiples()
    findings: Findings = dataclasses.field(default_factory=Findings, compare=False)

    def require(self, count: int, rows: bool) -> None:
        """Makes sure that dims of unknown size can be cut; see `require_multiples`."""
        known = self.multiples.of(rows)
        if known % count:
            # Noted, because Keras raises errors of its layers anew.
            key = "rows" if rows else "others"
            needs = {key: math.lcm(known, count)}
            self.findings.needs = dataclasses.replace(self.multiples, **needs)
            raise CannotLift(f"a dim of changing size is cut into {count} parts")


class _Active(threading.local):
    """Those of this thread's traces, innermost last."""

    def __init__(self) -> None:
        self.stack: list[TracedSizes | None] = []


_active = _Active()
_NOTE = "_kdist_shapes"
# Operations that hand their first input's inner dims on.
_KEEP_DIMS = frozenset({"Identity", "StridedSlice", "Split", "Slice", "Cast"})


@contextlib.contextmanager
def tracing_with(sizes: TracedSizes | None) -> Iterator[None]:
    """Makes `active` give these sizes within the block."""
    _active.stack.append(sizes)
    try:
        yield
    finally:
        _active.stack.pop()


def active() -> TracedSizes | None:
    """Those of the step that is being traced; None if it knows its shapes."""
    return _active.stack[-1] if _active.stack else None


def found(bounded: bool) -> None:
    """Notes what a program of the step that is being traced is for; see `Findings`."""
    sizes = active()
    if sizes is not None and bounded:
        sizes.findings.bounded = True


def require_multiples(count: int, rows: bool) -> None:
    """Makes sure that dims of unknown size can be cut.

    Args:
        count: Into how many parts.
        rows: Whether they are the batch.

    Raises:
        CannotLift: They need not be, or nothing is known about them.
    """
    sizes = active()
    if sizes is None:
        raise CannotLift("a dim of unknown size is cut")
    sizes.require(count, rows)


def note(tensors: Sequence[Any]) -> None:
    """Notes the examples of a batch's tensors, in the order in which `TracedSizes` has them."""
    sizes = active()
    if sizes is None:
        return
    for tensor, known in zip(tensors, sizes.leaves, strict=False):
        setattr(tensor, _NOTE, known)


def examples(tensor: Any) -> Examples | None:
    """A tensor's shape in each example; None if its shape is known.

    A part of a batch has the rows of an example, too: any number of rows is one.

    Raises:
        CannotLift: It is not a part of the batch.
    """
    shape, source = tensor.shape, tensor
    if shape.is_fully_defined():
        return None
    while not hasattr(source, _NOTE):
        if not isinstance(source, tf.Tensor) or source.op.type not in _KEEP_DIMS:
            raise CannotLift(f"a tensor of unknown shape that is no part of a batch: {tensor.name}")
        source = source.op.inputs[0]
    found: Examples = getattr(source, _NOTE)
    if any(len(one) != shape.rank for one in found.shapes):
        raise CannotLift(f"a part of a batch with other dims than the batch: {tensor.name}")

    def like(one: Shape) -> tuple:
        return tuple(given if size is None else size for size, given in zip(shape, one))

    return Examples(tuple(map(like, found.shapes)), tuple(map(like, found.probes)))


def following(shape_at: Callable[[Callable[[Any], Shape]], Shape]) -> Examples | None:
    """The shape in each example of what follows from parts of a batch.

    Args:
        shape_at: The shape, from a function that tells those of the parts.

    Raises:
        CannotLift: It does not follow, or a part is none of the batch.
    """
    known = active()
    if known is None:
        return None

    def shapes(kind: str, count: int) -> tuple[Shape, ...]:
        def shape_of(i: int, tensor: Any) -> Shape:
            found = examples(tensor)
            return tuple(tensor.shape) if found is None else getattr(found, kind)[i]

        return tuple(shape_at(functools.partial(shape_of, i)) for i in range(count))

    leaf = known.leaves[0]
    found = shapes("shapes", len(leaf.shapes))
    if any(None in one for one in found):
        raise CannotLift("what is looked up in a table does not follow from sizes")
    return Examples(found, shapes("probes", len(leaf.probes)))  # type: ignore[arg-type]
