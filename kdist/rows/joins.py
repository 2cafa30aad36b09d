"""Rules of joins and cuts: concatenations, stacks, slices, padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdist.rows.elementwise import added
from kdist.rows.node import Node, Shape, aligned, broadcast_flat, rule
from kdist.rows.values import Apart, Const, Linear, Rows, RowsMeet, Value


@rule("ConcatV2")
def concat(node: Node) -> Value:
    """Parts along another dim than the batch's, or whole batches one after the other."""
    count = len(node.values) - 1
    return _joined(node, range(count), node.axes(count, len(node.out_shape()))[0])


@rule("Concat")
def concat_axis_first(node: Node) -> Value:
    """As `ConcatV2`, with its inputs in the older order."""
    indices = range(1, len(node.values))
    return _joined(node, indices, node.axes(0, len(node.out_shape()))[0])


def _joined(node: Node, indices: Sequence[int], axis: int) -> Value:
    value, rank = added(node, indices), len(node.out_shape())
    parts = [node.values[i] for i in indices]
    if isinstance(value, Const):
        flat = broadcast_flat(node, rank, indices)
        everything = frozenset(range(rank)) if flat is None else flat
        return Const(everything - {axis}, value.power)
    if isinstance(value, Linear):
        return value
    rows = [p for p in parts if isinstance(p, Rows)]
    if rows[0].dim != axis:
        found = aligned(node, rank, indices)
        assert found is not None
        return dataclasses.replace(found, power=value.power)
    if len(rows) < len(parts) or any((r.dim, r.inner) != (axis, rows[0].inner) for r in rows):
        raise RowsMeet
    return dataclasses.replace(rows[0], outer=sum(r.outer for r in rows))


@rule("Pack")
def pack(node: Node) -> Value:
    """A new dim; the others move aside."""
    rank = len(node.out_shape())
    axis = node.attr("axis") % rank
    indices = range(len(node.values))
    value = added(node, indices)
    if isinstance(value, Const):
        flat = broadcast_flat(node, rank - 1)
        return Const(_inserted(flat, axis, rank), value.power)
    if isinstance(value, Rows):
        found = aligned(node, rank - 1)
        assert found is not None
        return dataclasses.replace(found, dim=found.dim + (found.dim >= axis), power=value.power)
    return value


def _inserted(flat: frozenset[int] | None, axis: int, rank: int) -> frozenset[int]:
    old = range(rank - 1) if flat is None else flat
    return frozenset(d + (d >= axis) for d in old)


@rule("Unpack")
def unpack(node: Node) -> Value:
    """The dim that goes must not be the batch's."""
    axis = node.attr("axis") % len(node.shape(0))
    return without_dims(node.values[0], [axis])


def without_dims(value: Apart, dims: Sequence[int]) -> Value:
    """What one place along some dims is.

    Raises:
        RowsMeet: The batch is one of them: that is one row for all.
    """
    if isinstance(value, Rows):
        if value.dim in dims:
            raise RowsMeet
        return dataclasses.replace(value, dim=value.dim - sum(d < value.dim for d in dims))
    if isinstance(value, Const) and value.flat is not None:
        kept = (d - sum(e < d for e in dims) for d in value.flat if d not in dims)
        return Const(frozenset(kept), value.power)
    return value


@rule("Split", "SplitV")
def split(node: Node) -> list[Value]:
    """Parts along another dim than the batch's, or of whole batches."""
    source = 1 if node.op.type == "Split" else 0
    axis_input = 0 if node.op.type == "Split" else 2
    value = node.values[source]
    count = len(node.op.outputs)
    if not isinstance(value, Rows):
        return [value] * count
    if node.axes(axis_input, len(node.shape(source)))[0] != value.dim:
        return [value] * count
    return [_part(value, node.out_shape(i)[value.dim], node.batch) for i in range(count)]


def _part(rows: Rows, size: int | None, batch: int) -> Rows:
    """A cut through the batch's dim that begins at, and is, a number of whole batches."""
    whole = batch * rows.inner
    if size is None or size == 0 or size % whole:
        raise RowsMeet
    return dataclasses.replace(rows, outer=size // whole)


@rule("Slice")
def cut(node: Node) -> Value:
    """A part of every dim; of the batch's, whole batches."""
    node.only_constants(1, 2)
    value = node.values[0]
    if not isinstance(value, Rows):
        return value
    begin, size = node.partial(1)[value.dim], node.out_shape()[value.dim]
    if size == node.shape(0)[value.dim]:
        return value
    if begin is None or begin % (node.batch * value.inner):
        raise RowsMeet
    return _part(value, size, node.batch)


@rule("XlaDynamicUpdateSlice")
def slice_update(node: Node) -> Value:
    """A part of a tensor that is written anew; of the batch's dim, all of it."""
    values = node.values[:2]
    if node.constant or any(isinstance(v, Linear) or v.power != 0 for v in values):
        raise RowsMeet
    node.only_constants(2)
    rows = next(v for v in values if isinstance(v, Rows))
    if node.shape(0)[rows.dim] != node.shape(1)[rows.dim]:
        raise RowsMeet
    if not all(v == rows or isinstance(v, Const) and v.is_flat(rows.dim) for v in values):
        raise RowsMeet
    return rows


@rule("StridedSlice")
def strided_slice(node: Node) -> Value:
    """Python's `x[...]`: parts, single places and new dims."""
    node.only_constants(1, 2, 3)
    value, shape = node.values[0], node.shape(0)
    if isinstance(value, Const) and value.flat is None:
        return value
    dims: list[tuple[int | None, bool]] = []  # per new dim: the old one, and whether it is whole
    gone: list[int] = []
    for old, kind, whole in _read_slice(node, shape):
        if kind == "gone":
            gone.append(old)
        else:
            dims.append((old if kind == "kept" else None, whole))
    if isinstance(value, Linear):
        return value
    old_dims = [old for old, _ in dims]
    if isinstance(value, Const):
        flat = frozenset(i for i, old in enumerate(old_dims) if old is None or value.is_flat(old))
        return Const(flat, value.power)
    if value.dim in gone:
        raise RowsMeet
    position = old_dims.index(value.dim)
    if not dims[position][1]:
        return _batches(node, value, position)
    return dataclasses.replace(value, dim=position)


def _batches(node: Node, rows: Rows, position: int) -> Rows:
    """A slice of the batch's dim, which must take whole batches from it."""
    begin = node.partial(1)
    plain = not (node.attr("ellipsis_mask") or node.attr("new_axis_mask"))
    start = begin[rows.dim] if plain and rows.dim < len(begin) else None
    if plain and node.attr("begin_mask") >> rows.dim & 1:
        start = 0
    strides = node.partial(3)
    if start is None or strides[rows.dim] != 1 or start < 0 or start % (node.batch * rows.inner):
        raise RowsMeet
    size = node.out_shape()[position]
    return dataclasses.replace(_part(rows, size, node.batch), dim=position)


def _read_slice(node: Node, shape: Shape) -> list[tuple[int, str, bool]]:
    """What `x[...]` does, as (old dim, "kept" or "gone" or "new", whether the dim is whole)."""
    masks = {m: node.attr(f"{m}_mask") for m in ("begin", "end", "ellipsis", "new_axis")}
    shrink = node.attr("shrink_axis_mask")
    begin, end, stride = (node.partial(i) for i in (1, 2, 3))
    count = len(begin)
    given = sum(
        not (masks["new_axis"] >> i & 1 or masks["ellipsis"] >> i & 1) for i in range(count)
    )
    found, old = [], 0
    for i in range(count):
        if masks["ellipsis"] >> i & 1:
            for _ in range(len(shape) - given):
                found.append((old, "kept", True))
                old += 1
        elif masks["new_axis"] >> i & 1:
            found.append((-1, "new", True))
        else:
            low = 0 if masks["begin"] >> i & 1 else begin[i]
            high = shape[old] if masks["end"] >> i & 1 else end[i]
            size = shape[old]
            reaches = high is not None and size is not None and high >= size
            whole = low == 0 and stride[i] == 1 and (reaches or bool(masks["end"] >> i & 1))
            found.append((old, "gone" if shrink >> i & 1 else "kept", whole))
            old += 1
    found.extend((d, "kept", True) for d in range(old, len(shape)))
    return found


@rule("Pad", "PadV2", "MirrorPad")
def pad(node: Node) -> Value:
    """Anything but along the batch."""
    node.only_constants(*range(1, len(node.values)))
    value = node.values[0]
    zeros = node.op.type == "Pad" or (node.op.type == "PadV2" and node.is_zero(2))
    if isinstance(value, Const):
        return Const(frozenset(), value.power)
    if (isinstance(value, Linear) or value.power) and not zeros:
        raise RowsMeet
    if isinstance(value, Rows) and node.static(1)[value.dim].any():
        raise RowsMeet
    return value
