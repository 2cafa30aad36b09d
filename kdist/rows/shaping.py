"""Rules of shapes: reshapes, transposes, repetition, fills, sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from kdist.rows.node import Node, Shape, aligned, broadcast_flat, rule
from kdist.rows.numbers import fixed, power_of
from kdist.rows.values import Const, Linear, Rows, RowsMeet, Value


@rule("Reshape", "ExpandDims", "Squeeze")
def reshape(node: Node) -> Value:
    """The batch keeps its place in the flat order of elements."""
    node.only_constants(*range(1, len(node.values)))
    value = node.values[0]
    if isinstance(value, Linear):
        return value
    before, after = node.shape(0), node.out_shape()
    if isinstance(value, Const):
        return _constant_after(node, value, before, after)
    return regrouped(value, before, after, node.batch)


def _constant_after(node: Node, value: Const, before: Shape, after: Shape) -> Const | Rows:
    """A constant after a reshape.

    What is the same for each row (queries that a model has learned, repeated for the batch) is so
    after it, but where rows and other entries share a dim only `Rows` can say it.
    """
    flat = _flat_after(value, before, after)
    if flat is None or value.power is None or any(_has_rows(node, after[d]) for d in flat):
        return Const(flat, value.power)
    for dim, size in enumerate(before):
        if size is not None and _has_rows(node, size) and value.is_flat(dim):
            alike = Rows(dim, size // node.batch, power=value.power)
            with contextlib.suppress(RowsMeet):
                return regrouped(alike, before, after, node.batch)
    return Const(flat, value.power)


def _has_rows(node: Node, size: int | None) -> bool:
    """Whether a size is known, and may be that of batches."""
    return size is not None and node.is_batch_multiple(size)


def regrouped(rows: Rows, before: Shape, after: Shape, batch: int) -> Rows:
    """Where the batch is after a reshape.

    The flat index of an element is (outer * B + row) * inner + rest. It has the same form in the
    new dims if one of them can be written so.

    Raises:
        RowsMeet: No dim holds whole rows, or a size is unknown.
    """
    if before.count(None) or after.count(None):
        return _regrouped_unknown(rows, before, after)
    outer = math.prod(_known(before[: rows.dim])) * rows.outer
    inner = math.prod(_known(before[rows.dim + 1 :])) * rows.inner
    sizes = _known(after)
    for dim, size in enumerate(sizes):
        left, right = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
        whole = left and right and outer % left == 0 and inner % right == 0
        if whole and size == (outer // left) * batch * (inner // right):
            return Rows(dim, outer // left, inner // right, rows.power)
    raise RowsMeet


def _regrouped_unknown(rows: Rows, before: Shape, after: Shape) -> Rows:
    """With unknown sizes only a dim that clearly stays is followed: all on one side are kept."""
    if before[: rows.dim + 1] == after[: rows.dim + 1] and None not in before[: rows.dim + 1]:
        return rows
    raise RowsMeet


def _known(sizes: Sequence[int | None]) -> list[int]:
    return [s for s in sizes if s is not None]


def _flat_after(value: Const, before: Shape, after: Shape) -> frozenset[int] | None:
    """The dims of a reshaped constant that come from one flat dim each, or from flat dims only."""
    if value.flat is None:
        return None
    if None in before or None in after:
        return frozenset()
    flat: set[int] = set()
    i = j = 0
    old, new = _known(before), _known(after)
    while i < len(old) and j < len(new):
        start_i, start_j = i, j
        left, right = old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(old):
                left, i = left * old[i], i + 1
            elif left > right and j < len(new):
                right, j = right * new[j], j + 1
            else:
                return frozenset(flat)
        if all(value.is_flat(d) or old[d] == 1 for d in range(start_i, i)):
            flat.update(range(start_j, j))
    return frozenset(flat)


@rule("Transpose", "ConjugateTranspose")
def transpose(node: Node) -> Value:
    """The batch moves with its dim."""
    value = node.values[0]
    if isinstance(value, Linear):
        return value
    order = [int(p) for p in node.static(1)]
    if isinstance(value, Const):
        if value.flat is None:
            return value
        flat = frozenset(i for i, p in enumerate(order) if p in value.flat)
        return Const(flat, value.power)
    return dataclasses.replace(value, dim=order.index(value.dim))


@rule("BroadcastTo")
def broadcast_to(node: Node) -> Value:
    """New places along a dim repeat what is there."""
    node.only_constants(1)
    value, rank = node.values[0], len(node.out_shape())
    if isinstance(value, Const):
        return Const(broadcast_flat(node, rank, (0,)), value.power)
    if isinstance(value, Rows):
        found = aligned(node, rank, (0,))
        assert found is not None
        return dataclasses.replace(found, power=value.power)
    return value


@rule("Tile")
def tile(node: Node) -> Value:
    """A repeated batch stands in its dim several times."""
    node.only_constants(1)
    value, shape = node.values[0], node.shape(0)
    if isinstance(value, Const):
        if value.flat is None:
            return value
        flat = (d for d, size in enumerate(shape) if size == 1 or value.is_flat(d))
        return Const(frozenset(flat), value.power)
    if isinstance(value, Rows):
        times = node.partial(1)[value.dim]
        if times is None:
            raise RowsMeet
        return dataclasses.replace(value, outer=value.outer * times)
    return value


@rule("Fill")
def fill(node: Node) -> Value:
    """One value everywhere."""
    node.only_constants(0)
    value = node.values[1]
    if isinstance(value, Const):
        return Const(flat=None, power=value.power)
    return value


@rule("ZerosLike", "OnesLike")
def like(node: Node) -> Value:
    """Only the shape is looked at."""
    return Const(flat=None)


@rule("Shape", "ShapeN", "Size", "Rank", "InvertPermutation", "TensorListLength")
def sizes(node: Node) -> list[Value]:
    """Sizes may contain the batch's."""
    found: list[Value] = []
    for output in node.op.outputs:
        value = fixed(output)
        power = None if value is None else power_of(value, node.batch)
        found.append(Const(power=power))
    return found
