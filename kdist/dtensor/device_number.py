"""What a lowered program computes from its device's number and constants alone.

DTensor writes one program for all devices: which part of a tensor a device has, which group a
collective is of, and which seed is its own are looked up by the device's number. Where copies of
the program are made, the number is known, and so are these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdist._compat.xla_clusters import MUST_COMPILE
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

SHAPES = "_output_shapes"
_KEPT = {SHAPES, MUST_COMPILE}
MOST_ELEMENTS = 4096
"""Larger values are computed where they are needed."""
# They have one result, no state, and no function among their attributes.
_FOLDED = frozenset(
    {
        *("Const", "Identity", "Cast", "Bitcast", "Shape", "Size", "Rank"),
        *("Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "FloorDiv", "TruncateDiv", "Neg"),
        *("Mod", "FloorMod", "TruncateMod", "Maximum", "Minimum", "Sum", "Prod", "MatMul"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"),
        *("LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2"),
        *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"),
        *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Tile", "BroadcastTo", "Fill"),
        *("Slice", "StridedSlice", "GatherV2", "Pack", "ConcatV2", "Pad", "PadV2", "Range"),
        *("OneHot", "TensorStridedSliceUpdate"),
    }
)


def known_nodes(nodes: Mapping[str, Any], order: Sequence[str], number: str) -> dict[str, bool]:
    """The nodes that nothing but constants and the device's number goes into.

    Args:
        nodes: The program's nodes by name.
        order: Their names, inputs first.
        number: Name of the parameter that is the device's number, "" if there is none.

    Returns:
        Their names, and whether the number goes into them.
    """
    known = {number: True}
    for name in order:
        node = nodes[name]
        if node.op not in _FOLDED or any(one.startswith("^") for one in node.input):
            continue
        sources = [node_of(one) for one in node.input]
        if all(one in known for one in sources):
            known[name] = any(known[one] for one in sources)
    known.pop(number)
    return known


def is_small(node: Any) -> bool:
    """Whether a node's result has a known shape, and few elements."""
    if node.op == "Const":
        return (
            tf.TensorShape(node.attr["value"].tensor.tensor_shape).num_elements() <= MOST_ELEMENTS
        )
    shapes = node.attr[SHAPES].list.shape if SHAPES in node.attr else ()
    if not shapes or shapes[0].unknown_rank:
        return False
    sizes = [dim.size for dim in shapes[0].dim]
    return -1 not in sizes and int(np.prod(sizes)) <= MOST_ELEMENTS


def values_on_devices(
    nodes: Mapping[str, Any], wanted: Iterable[str], number: str, devices: int
) -> dict[str, list[np.ndarray]]:
    """Computes known nodes for each device.

    Args:
        nodes: The program's nodes by name.
        wanted: Names of known nodes.
        number: See `known_nodes`.
        devices: How many there are.

    Returns:
        For each of the nodes its value on each device.
    """
    wanted = list(wanted)
    if not wanted:
        return {}
    short = {name: f"n{i}" for i, name in enumerate(_needed(nodes, wanted, number))}
    short[number] = "number"
    graph = graph_pb2.GraphDef()
    for name in short:
        if name != number:
            node = without_notes(nodes[name])
            inputs = [f"{short[node_of(one)]}:0" for one in node.input]
            del node.input[:]
            node.input.extend(inputs)
            node.name, node.device = short[name], ""
            graph.node.append(node)

    def compute(device: Any) -> list[Any]:
        return tf.graph_util.import_graph_def(
            graph,
            input_map={"number:0": device},
            return_elements=[f"{short[name]}:0" for name in wanted],
            name="",
        )

    with tf.init_scope(), tf.device("CPU:0"):
        run = tf.compat.v1.wrap_function(compute, [tf.TensorSpec([], tf.int32)])
        rows = [[v.numpy() for v in run(tf.constant(k))] for k in range(devices)]
    return {name: [row[i] for row in rows] for i, name in enumerate(wanted)}


def _needed(nodes: Mapping[str, Any], wanted: Iterable[str], number: str) -> list[str]:
    """The nodes that some nodes are computed from, themselves included."""
    found: dict[str, None] = {}
    stack = list(wanted)
    while stack:
        name = stack.pop()
        if name not in found and name != number:
            found[name] = None
            stack.extend(map(node_of, nodes[name].input))
    return list(found)


def without_notes(node: Any) -> Any:
    """A copy of a node without what DTensor noted on it, but its shapes; XLA compiles it still."""
    plain = node_def_pb2.NodeDef()
    plain.CopyFrom(node)
    for key in [key for key in plain.attr if key.startswith("_") and key not in _KEPT]:
        del plain.attr[key]
    return plain
