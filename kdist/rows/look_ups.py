"""Rules of look-ups: rows choose from tables, or something is chosen from every row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdist.rows.node import Node, rule
from kdist.rows.values import Apart, Const, Linear, Rows, RowsMeet, Value, powers


@rule("GatherV2", "Gather")
def gather(node: Node) -> Value:
    """Rows choose from a table, or a constant choice is made from every row."""
    params, indices = node.values[0], node.values[1]
    rank, taken = len(node.shape(0)), len(node.shape(1))
    axis = node.axes(2, rank)[0] if node.op.type == "GatherV2" else 0
    shared = node.attr("batch_dims") if node.op.type == "GatherV2" else 0
    if isinstance(indices, Linear) or isinstance(indices, Rows) and indices.power:
        raise RowsMeet
    if isinstance(params, Linear):
        if isinstance(indices, Rows):
            raise RowsMeet
        return params
    if isinstance(indices, Const) and indices.power != 0 and not node.constant:
        raise RowsMeet
    places = [d if d < shared else axis + d - shared for d in range(taken)]
    kept = [d if d < axis else d + taken - shared - 1 for d in range(rank)]
    if isinstance(params, Const) and isinstance(indices, Const):
        out = range(rank + taken - shared - 1)
        flat = {places[d] for d in range(taken) if indices.is_flat(d) and d >= shared}
        flat |= {kept[d] for d in range(rank) if d != axis and d >= shared and params.is_flat(d)}
        flat |= {d for d in range(shared) if params.is_flat(d) and indices.is_flat(d)}
        everything = params.flat is None and indices.flat is None
        return Const(None if everything else frozenset(flat & set(out)), params.power)
    return _gathered(params, indices, axis, shared, places, kept)


def _gathered(
    params: Apart,
    indices: Apart,
    axis: int,
    shared: int,
    places: Sequence[int],
    kept: Sequence[int],
) -> Rows:
    """Where the batch is after a look-up of, or with, rows.

    Args:
        params: What is looked up.
        indices: The places.
        axis: The dim of `params` that they are in.
        shared: How many leading dims both have in common.
        places: The new dim of each dim of the indices.
        kept: The new dim of each dim of `params`, `axis` apart.
    """
    if isinstance(params, Rows):
        if params.dim == axis:
            raise RowsMeet
        if isinstance(indices, Rows):
            same = params.layout == indices.layout and params.dim < shared
            if not same:
                raise RowsMeet
        elif isinstance(indices, Const) and params.dim < shared and not indices.is_flat(params.dim):
            raise RowsMeet
        return dataclasses.replace(params, dim=kept[params.dim])
    assert isinstance(indices, Rows)
    assert isinstance(params, Const)
    if params.power != 0 or (indices.dim < shared and not params.is_flat(indices.dim)):
        raise RowsMeet
    return dataclasses.replace(indices, dim=places[indices.dim])


@rule("GatherNd")
def gather_nd(node: Node) -> Value:
    """Rows choose from a table."""
    table, indices = node.values
    if node.constant:
        return Const(power=0 if all(p == 0 for p in powers(node.values)) else None)
    if any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    last = len(node.shape(1)) - 1
    depth = node.shape(1)[last]
    if isinstance(table, Const) and isinstance(indices, Rows) and indices.dim < last:
        return indices
    if isinstance(table, Rows) and isinstance(indices, Const) and depth is not None:
        if table.dim < depth:
            raise RowsMeet
        return dataclasses.replace(table, dim=table.dim - depth + last)
    raise RowsMeet


@rule("LookupTableFindV2")
def find_in_table(node: Node) -> Value:
    """Every key by itself."""
    keys = node.values[1]
    if node.constant:
        return Const(power=0 if all(p == 0 for p in powers(node.values)) else None)
    node.only_constants(0, 2)
    if not isinstance(keys, Rows) or keys.power:
        raise RowsMeet
    return keys


@rule("OneHot")
def one_hot(node: Node) -> Value:
    """A new dim behind, or before, the others."""
    value = node.values[0]
    if node.constant:
        flat = frozenset[int]()
        if isinstance(value, Const) and node.attr("axis") == -1:
            rank = len(node.shape(0))
            flat = frozenset(d for d in range(rank) if value.is_flat(d))
        return Const(flat, 0 if all(p == 0 for p in powers(node.values)) else None)
    node.only_constants(1, 2, 3)
    if not isinstance(value, Rows) or any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    axis = node.attr("axis") % len(node.out_shape())
    return dataclasses.replace(value, dim=value.dim + (value.dim >= axis))
