"""Einsums that sum over two labels, of which an axis cuts another one in each operand.

```
abc,abd->cd     x: a is cut over the axis     y: b is cut over the same axis
```

DTensor 2.21 makes both operands whole then, and adds up what is whole on every device: the result
is as many times too large as there are devices. Where a program has one, the smaller operand is
made whole before, and DTensor cuts it like the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kdist.dtensor.body import Body, control_inputs, data_inputs
from kdist.dtensor.collectives import CannotStitch
from kdist.graphs.chunks import node_of

from tensorflow.core.framework import node_def_pb2
from tensorflow.experimental import dtensor

_TRACED = "_global_shape"
"""An attribute of the nodes that DTensor was given, and did not add."""
_WRITTEN = "TensorStridedSliceUpdate"
_SPECS = re.compile(r"^sharding_specs:([^ ]*), mesh:")


def uncross(body: Body, definition: Any, mesh: dtensor.Mesh) -> bool:
    """Has an operand of such einsums made whole over the axis; whether there are any.

    Args:
        body: The traced function; changed.
        definition: What DTensor made of it, which is of no use then.
        mesh: The mesh of a slice.

    Raises:
        CannotStitch: One is not in the traced function, as it was made while lowering.
    """
    nodes = {node.name: node for node in definition.node_def}
    found = [one for node in definition.node_def for one in _crossed(node, nodes)]
    found = [(name, dims) for name, dims in found if _name(name) not in body.nodes]
    for name, dims in found:
        if name not in body.nodes:
            raise CannotStitch(f"an einsum whose operands are cut crosswise ({name})")
        _make_whole(body, name, dims, mesh)
    return bool(found)


def _crossed(
    node: Any, nodes: Mapping[str, Any]
) -> Iterator[tuple[str, list[tuple[list[str], set[str]]]]]:
    """An einsum of which labels are cut crosswise: its name, and of each operand the cuts.

    Those are the axis of each dim, and the axes that cut crosswise.
    """
    inputs = data_inputs(node)
    if node.op != "Einsum" or len(inputs) != 2:
        return
    taken, _, given = node.attr["equation"].s.decode().partition("->")
    labels, places = taken.split(","), [_cuts(nodes, one) for one in inputs]
    first, second = (
        {axis: label for label, axis in zip(of, cuts) if label not in given}
        for of, cuts in zip(labels, places)
    )
    both = first.keys() & second.keys() - {dtensor.UNSHARDED}
    axes = {axis for axis in both if first[axis] != second[axis]}
    if axes:
        yield node.name, [(cuts, axes) for cuts in places]


def _cuts(nodes: Mapping[str, Any], reference: str) -> list[str]:
    """The axis of each dim of a tensor before DTensor changed it; none where that is not known."""
    seen: set[str] = set()
    while (node := nodes.get(node_of(reference))) is not None and node.name not in seen:
        seen.add(node.name)
        if _TRACED in node.attr:
            noted = node.attr["_layout"].list.s
            found = _SPECS.match(noted[0].decode()) if noted else None
            return found[1].split(",") if found else []
        inputs = data_inputs(node)
        # On a mesh of several axes it gathers by adding up what is written into zeros, the last.
        reference = inputs[-1 if node.op == _WRITTEN else 0] if inputs else ""
    return []


def _make_whole(
    body: Body, name: str, operands: list[tuple[list[str], set[str]]], mesh: dtensor.Mesh
) -> None:
    """Lays the smaller operand of an einsum out without some axes."""
    node = node_def_pb2.NodeDef()
    node.CopyFrom(body.nodes[name])
    inputs = data_inputs(node)
    sizes = [body.specs[one].shape.num_elements() or 0 for one in inputs]
    n = sizes.index(min(sizes))
    cuts, axes = operands[n]
    layout = dtensor.Layout([dtensor.UNSHARDED if c in axes else c for c in cuts], mesh)
    inputs[n] = body.lay_out(inputs[n], layout, _name(name))
    node.input[:] = [*inputs, *control_inputs(node)]
    body.nodes[name] = node


def _name(einsum: str) -> str:
    return f"{einsum}/uncrossed"
