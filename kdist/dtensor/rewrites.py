"""Operations that DTensor expands wrongly, or not at all, written as others; a table.

A rewrite is exact, and keeps its operand cut where it can be. What has none becomes an island
(`kdist.dtensor.islands`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kdist.dtensor.body import Body, control_inputs, data_inputs
from kdist.dtensor.indexing import Indexing, indexing
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

SLICE = "StridedSlice"
SLICE_GRADIENT = "StridedSliceGrad"
CONCAT = "ConcatV2"
STACK, UNSTACK = "Pack", "Unpack"
SQUEEZE = "Squeeze"
CHECK = "CheckNumerics"
_SUMMARY = "DebugNumericSummaryV2"
PRODUCT = "BatchMatMulV3"
"""A product whose result has another dtype: Keras's of int8."""


def rewrite(body: Body) -> int:
    """Applies the table to a traced function; returns how many nodes it has rewritten."""
    count = _check_numbers(body)
    for name in list(body.nodes):
        node = body.nodes.get(name)  # perhaps another than before: one of them had it read another
        if node is not None and node.op in TABLE:
            count += TABLE[node.op](body, node)
    return count


def _new_axes(body: Body, node: Any) -> bool:
    """`x[:, None]`: a slice, if one is left, then a dim of size 1 after the other."""
    found = _indexing(body, node, node.input[0], 1)
    if found is None:
        return False
    source, shape = node.input[0], list(body.specs[node.input[0]].shape)
    if not found.takes_all:
        source = _sliced(body, node, found, source)
        shape = list(body.specs[source].shape)
    for j, at in enumerate(found.new):
        shape.insert(at, 1)
        last = j == len(found.new) - 1
        name = node.name if last else f"{node.name}/new_axis_{at}"
        source = _add(
            body, node, "ExpandDims", name, [source, body.add_constant(f"{name}/at", at)], shape
        )
    return True


def _gradient_of_new_axes(body: Body, node: Any) -> bool:
    """The gradient of `x[:, None]`: without the new dims, then that of the slice, if any."""
    spec = body.specs.get(f"{node.name}:output:0")
    if spec is None or spec.shape.rank is None:
        return False
    found = _indexing(body, node, None, 1, spec.shape.rank)
    given = body.specs[node.input[4]].shape
    if found is None or given.rank is None:
        return False
    shape = [n for i, n in enumerate(given) if i not in found.new]
    name = node.name if found.takes_all else f"{node.name}/without_new_axes"
    inputs, waits = list(node.input), control_inputs(node)
    source = _add(body, node, "Squeeze", name, [inputs[4]], shape, squeeze_dims=found.new)
    if not found.takes_all:
        made = node_def_pb2.NodeDef()
        made.CopyFrom(node)
        made.input[:] = [inputs[0], *_bounds(body, node, found), source, *waits]
        _set_masks(made, found)
        body.nodes[node.name] = made
    return True


def _indexing(
    body: Body, node: Any, source: str | None, first: int, rank: int | None = None
) -> Indexing | None:
    """How a slice with new axes slices; None without them, or where bounds are computed."""
    if not node.attr["new_axis_mask"].i:
        return None
    return spelled_out(body, node, source, first, rank)


def spelled_out(
    body: Body, node: Any, source: str | None, first: int, rank: int | None = None
) -> Indexing | None:
    """How a slice slices, dim by dim; None where its bounds are computed."""
    if source is not None:
        rank = body.specs[source].shape.rank
    bounds = tuple(body.constant(one) for one in node.input[first : first + 3])
    if rank is None or any(one is None for one in bounds):
        return None
    keys = ("begin_mask", "end_mask", "shrink_axis_mask", "new_axis_mask", "ellipsis_mask")
    return indexing({key: node.attr[key].i for key in keys}, bounds, rank)  # type: ignore[arg-type]


def _sliced(body: Body, node: Any, found: Indexing, source: str) -> str:
    """The slice of a node that also makes new axes, without these."""
    made = node_def_pb2.NodeDef()
    made.CopyFrom(node)
    made.name = f"{node.name}/slice"
    made.input[:] = [source, *_bounds(body, node, found), *control_inputs(node)]
    _set_masks(made, found)
    body.nodes[made.name] = made
    dims = list(body.specs[f"{node.name}:output:0"].shape)
    for at in reversed(found.new):
        del dims[at]
    reference = f"{made.name}:output:0"
    body.note(reference, dims, body.specs[source].dtype)
    return reference


def _set_masks(node: Any, found: Indexing) -> None:
    for key, value in {**found.masks, "new_axis_mask": 0, "ellipsis_mask": 0}.items():
        node.attr[key].i = value


def _bounds(body: Body, node: Any, found: Indexing) -> list[str]:
    """Constants for where a slice begins and ends, and its strides."""
    dtype = tf.as_dtype(node.attr["Index"].type).as_numpy_dtype
    rows = {"begin": found.begin, "end": found.end, "strides": found.strides}
    return [
        body.add_constant(f"{node.name}/{key}", np.asarray(row, dtype)) for key, row in rows.items()
    ]


def _add(
    body: Body,
    node: Any,
    op: str,
    name: str,
    inputs: list[str],
    shape: list[Any],
    squeeze_dims: tuple[int, ...] | None = None,
) -> str:
    """Adds a node that makes one tensor of the dtype of another, or puts it in that one's place."""
    made = node_def_pb2.NodeDef(name=name, op=op)
    made.input.extend([*inputs, *control_inputs(node)])
    made.attr["T"].type = node.attr["T"].type
    if squeeze_dims is None:
        made.attr["Tdim"].type = tf.int32.as_datatype_enum
    else:
        made.attr["squeeze_dims"].list.i.extend(squeeze_dims)
    body.nodes[name] = made
    reference = f"{name}:output:0"
    body.note(reference, shape, tf.as_dtype(node.attr["T"].type))
    return reference


def _counted_from_the_front(body: Body, node: Any) -> bool:
    """A concatenation along dim -1: DTensor joins parts that are cut along it, each for itself."""
    count = node.attr["N"].i
    axis = body.constant(node.input[count])
    rank = body.specs[node.input[0]].shape.rank
    if axis is None or axis >= 0 or rank is None:
        return False
    node.input[count] = body.add_constant(f"{node.name}/dim", np.asarray(axis + rank, axis.dtype))
    return True


def with_dims_from_the_front(graph: Any) -> Any:
    """The definition of a graph in which no concatenation counts its dim from the end."""
    definition = graph.as_graph_def()
    for node in list(definition.node):
        if node.op != CONCAT:
            continue
        operation = graph.get_operation_by_name(node.name)
        axis = tf.get_static_value(operation.inputs[-1])
        rank = operation.inputs[0].shape.rank
        if axis is not None and axis < 0 and rank is not None:
            dim = definition.node.add(name=f"{node.name}/dim", op="Const")
            proto = tf.make_tensor_proto(axis + rank, operation.inputs[-1].dtype)
            dim.attr["dtype"].type = proto.dtype
            dim.attr["value"].tensor.CopyFrom(proto)
            node.input[len(operation.inputs) - 1] = dim.name
    return definition


def _cast_before(body: Body, node: Any) -> bool:
    """A product of int8 to int32: of its operands as int32, in which it is summed either way.

    DTensor has no rule for the former, and would gather both operands without an error.
    """
    dtype = node.attr["Tout"].type
    inputs = []
    for i, (source, given) in enumerate(zip(data_inputs(node), ("Ta", "Tb"), strict=True)):
        if node.attr[given].type != dtype:
            cast = node_def_pb2.NodeDef(name=f"{node.name}/cast_{i}", op="Cast", input=[source])
            cast.attr["SrcT"].type, cast.attr["DstT"].type = node.attr[given].type, dtype
            body.nodes[cast.name] = cast
            reference = f"{cast.name}:y:0"
            body.note(reference, body.specs[source].shape, tf.as_dtype(dtype))
            source = reference
        inputs.append(source)
    made = node_def_pb2.NodeDef(name=node.name, op="BatchMatMulV2")
    made.input.extend([*inputs, *control_inputs(node)])
    made.attr["T"].type = dtype
    for key in ("adj_x", "adj_y"):
        made.attr[key].b = node.attr[key].b
    body.nodes[node.name] = made
    return True


def _stacked(body: Body, node: Any) -> bool:
    """A stack: parts with a new dim each, put together along it.

    DTensor fails where the parts are not all cut along the same dims.
    """
    spec = body.specs.get(f"{node.name}:output:0")
    sources = data_inputs(node)
    parts = [body.specs[one].shape for one in sources]
    if spec is None or not _of_numbers(spec) or any(one.rank is None for one in parts):
        return False
    at = node.attr["axis"].i % spec.shape.rank
    dim = body.add_constant(f"{node.name}/dim", at)
    alone = len(sources) == 1  # nothing is concatenated alone
    inputs = []
    for i, (source, part) in enumerate(zip(sources, parts)):
        name = node.name if alone else f"{node.name}/part_{i}"
        shape = [*part[:at], 1, *part[at:]]
        inputs.append(_add(body, node, "ExpandDims", name, [source, dim], shape))
    if alone:
        return True
    made = node_def_pb2.NodeDef(name=node.name, op=CONCAT)
    made.input.extend([*inputs, dim, *control_inputs(node)])
    made.attr["N"].i, made.attr["T"].type = len(inputs), node.attr["T"].type
    made.attr["Tidx"].type = tf.int32.as_datatype_enum
    body.nodes[node.name] = made
    return True


def _unstacked(body: Body, node: Any) -> bool:
    """Tensors of one dim less: slices, one for each.

    DTensor fails where these are to be cut in another way than what they are of.
    """
    (source,), count = data_inputs(node), node.attr["num"].i
    spec = body.specs[source]
    if not _of_numbers(spec) or not count:
        return False
    readers = [name for name in body.nodes if name != node.name]
    at, rank = node.attr["axis"].i % spec.shape.rank, spec.shape.rank
    shape = [n for dim, n in enumerate(spec.shape) if dim != at]
    others = ((1 << rank) - 1) ^ (1 << at)
    masks = {"begin_mask": others, "end_mask": others, "shrink_axis_mask": 1 << at}
    instead = {f"^{node.name}": f"^{node.name}/part_0"}
    for i in range(count):
        begin, end = np.zeros((2, rank), np.int32)
        begin[at], end[at] = i, i + 1
        found = Indexing(tuple(begin), tuple(end), (1,) * rank, masks, ())
        made = node_def_pb2.NodeDef(name=f"{node.name}/part_{i}", op=SLICE)
        made.attr["T"].type = node.attr["T"].type
        made.attr["Index"].type = tf.int32.as_datatype_enum
        made.input.extend([source, *_bounds(body, made, found), *control_inputs(node)])
        _set_masks(made, found)
        body.nodes[made.name] = made
        reference = f"{made.name}:output:0"
        body.note(reference, shape, spec.dtype)
        instead[f"{node.name}:output:{i}"] = reference
    del body.nodes[node.name]
    body.redirect(instead, readers)
    return True


def _squeezed(body: Body, node: Any) -> bool:
    """A tensor whose dims but one have size 1, without these: reshaped, since DTensor cuts that.

    BatchNormalization makes its statistics so, and stores them as they are cut.
    """
    (source,) = data_inputs(node)
    spec = body.specs.get(f"{node.name}:output:0")
    if spec is None or not spec.dtype.is_floating or not spec.shape.is_fully_defined():
        return False
    if spec.shape.rank != 1:
        return False
    made = node_def_pb2.NodeDef(name=node.name, op="Reshape")
    shape = body.add_constant(f"{node.name}/shape", np.asarray(spec.shape, np.int32))
    made.input.extend([source, shape, *control_inputs(node)])
    made.attr["T"].type, made.attr["Tshape"].type = node.attr["T"].type, _number(tf.int32)
    body.nodes[node.name] = made
    return True


def _number(dtype: tf.DType) -> int:
    return int(dtype.as_datatype_enum)


def _of_numbers(spec: tf.TensorSpec) -> bool:
    """Whether a tensor can be cut: shapes that are put together are not."""
    return spec.dtype.is_floating and spec.shape.rank is not None and spec.shape.rank > 1


def _check_numbers(body: Body) -> int:
    """Has `CheckNumericsV2` check the numbers themselves, and what follows read what is checked.

    `tf.debugging.enable_check_numerics` has three numbers of each tensor checked, which nothing
    reads; what makes them has no rule, and would have every tensor gathered.
    """
    checks = [node for node in body.nodes.values() if node.op == f"{CHECK}V2"]
    instead = {}
    for node in checks:
        (source,) = data_inputs(node)
        summary = body.nodes.get(node_of(source))
        if summary is not None and summary.op == _SUMMARY:
            (source,) = data_inputs(summary)
            body.nodes.pop(summary.name)
        spec = body.specs[source]
        made = node_def_pb2.NodeDef(name=node.name, op=CHECK)
        made.attr["T"].type = spec.dtype.as_datatype_enum
        made.attr["message"].CopyFrom(node.attr["message"])
        made.input.extend([source, *control_inputs(node)])
        instead[source] = f"{node.name}:output:0"
        body.note(instead[source], spec.shape, spec.dtype)
        body.nodes[node.name] = made
    names = {node.name for node in checks}
    body.redirect(instead, [name for name in body.nodes if name not in names])
    return len(checks)


TABLE: Mapping[str, Callable[[Body, Any], bool]] = {
    SLICE: _new_axes,
    SLICE_GRADIENT: _gradient_of_new_axes,
    CONCAT: _counted_from_the_front,
    PRODUCT: _cast_before,
    STACK: _stacked,
    UNSTACK: _unstacked,
    SQUEEZE: _squeezed,
}
"""By type of an operation: rewrites a node of it in place, and says whether it has."""
