"""The graph of a training step as TensorFlow executes it, for `kdist.live`.

TensorFlow hands out executed graphs only of functions that run for the first time. So the step is
traced once more and run, on zeros, and every variable that it can write gets its value back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist import _private_executed
from kdist.device import Device
from kdist.live import RECEIVES, LiveTensors, Op, Output

import keras
import tensorflow as tf

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_SENDS = ("_Send", "_HostSend")
_SHAPES = "_output_shapes"


def live_tensors(
    step: Any, batch: Any, parameters: Sequence[keras.Variable], *, shared_memory: bool
) -> LiveTensors:
    """What may be alive at once in a training step.

    Args:
        step: A `kdist.step.Step` whose slices are plain devices.
        batch: (x, y, sample_weight), concrete tensors. Their values do not matter.
        parameters: The local variables that are (parts of) weights.
        shared_memory: See `LiveTensors`.
    """
    noted: list[Any] = []
    with _noting_gradients(step.runner, noted):
        concrete = tf.function(step.train, autograph=False).get_concrete_function(batch)
    with _kept(concrete.captured_inputs):
        graphs = _private_executed.function_graphs(lambda: concrete(batch))
    largest = max(graphs, key=lambda g: sum(len(p.node) for p in g.partition_graphs))
    handles = {id(v.value.handle) for v in parameters}
    reads = _reads(concrete, handles)
    ops = read_ops(largest, concrete.graph)
    gradients = [o for tensor in noted for o in _outputs(tensor)]
    return LiveTensors(ops, gradients, reads, shared_memory=shared_memory)


@contextlib.contextmanager
def _noting_gradients(runner: Any, noted: list[Any]) -> Iterator[None]:
    """Meanwhile, notes the gradients that the slices computed."""
    original = runner.gradient_at

    def gradient_at(results: Sequence[Sequence[Any]]) -> Any:
        noted.extend(g for gradients in results for g in gradients)
        return original(results)

    runner.gradient_at = gradient_at
    try:
        yield
    finally:
        del runner.gradient_at


@contextlib.contextmanager
def _kept(captured: Sequence[Any]) -> Iterator[None]:
    """Gives variables back what they had before, whatever is written meanwhile."""
    handles = [t for t in captured if t.dtype == tf.resource]
    values = []
    for handle in handles:
        dtype = _dtype_of(handle)
        if dtype is not None:
            with tf.device(handle.device):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            values.append((handle, dtype, value.numpy()))
    try:
        yield
    finally:
        for handle, dtype, value in values:
            with tf.device(handle.device):
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value, dtype))


def _dtype_of(handle: Any) -> tf.DType | None:
    data = handle._handle_data
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def _reads(concrete: Any, handles: set[int]) -> list[str]:
    """Names of the operations that read some variables."""
    inside = {id(inner) for outer, inner in concrete.graph.captures if id(outer) in handles}
    return [
        op.name
        for op in concrete.graph.get_operations()
        if op.type == "ReadVariableOp" and id(op.inputs[0]) in inside
    ]


def _outputs(tensor: Any) -> list[Output]:
    parts = [tensor.values] if isinstance(tensor, tf.IndexedSlices) else [tensor]
    return [(t.op.name, t.value_index) for t in parts]


def read_ops(function: Any, trace: Any) -> list[Op]:
    """The operations of an executed function, on all devices.

    Args:
        function: Its `RunMetadata.FunctionGraphs`.
        trace: The graph that was traced, which knows the shapes of what calls return.
    """
    every = [node for graph in function.partition_graphs for node in graph.node]
    sent = {_edge(node): node.input[0] for node in every if node.op in _SENDS}
    nodes = {node.name: node for node in every if node.op not in _SENDS}
    sizes = _sizes(nodes, sent, trace, function.post_optimization_graph.library)
    return [_op(node, sent, sizes[name]) for name, node in nodes.items()]


def _edge(node: Any) -> tuple[bytes, bytes, bytes]:
    attr = node.attr
    return attr["tensor_name"].s, attr["send_device"].s, attr["recv_device"].s


def _op(node: Any, sent: Mapping[Any, str], nbytes: tuple[int, ...]) -> Op:
    names = [sent[_edge(node)]] if node.op in RECEIVES else list(node.input)
    return Op(
        name=node.name,
        kind=node.op,
        device=Device.parse(node.device).name,
        inputs=tuple(_output(n) for n in names if not n.startswith("^")),
        waits=tuple(n[1:] for n in names if n.startswith("^")),
        nbytes=nbytes,
        call=node.op in CALLS,
    )


def _output(name: str) -> Output:
    node, _, number = name.partition(":")
    return node, int(number or 0)


def _sizes(
    nodes: Mapping[str, Any], sent: Mapping[Any, str], trace: Any, library: Any
) -> dict[str, tuple[int, ...]]:
    """Bytes of all outputs: shapes are inferred through all devices' graphs as one."""
    whole, needed = tf.compat.v1.GraphDef(library=library), _needed(trace)
    for node in nodes.values():
        copy = whole.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        copy.attr.pop(_SHAPES, None)
        if node.op in RECEIVES:
            copy.op = "Identity"
            copy.input[:] = [sent[_edge(node)]]
            copy.attr.clear()
            copy.attr["T"].CopyFrom(node.attr["tensor_type"])
        if node.op in (*CALLS, "_Arg"):
            copy.attr[_SHAPES].list.shape.extend(_traced_shapes(node, trace, needed))
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(whole, name="")
    return _bounded(graph)


def _bounded(graph: tf.Graph) -> dict[str, tuple[int, ...]]:
    """Bytes of outputs. Where a shape depends on values: those of the largest input.

    That bounds what look-ups make: the distinct rows of a gradient are no more than its rows.
    """
    found: dict[Output, int] = {}
    for op in graph.get_operations():
        most = max([found.get((t.op.name, t.value_index), 0) for t in op.inputs], default=0)
        for k, tensor in enumerate(op.outputs):
            nbytes = _nbytes(tensor)
            found[op.name, k] = most if nbytes is None else nbytes
    return {
        op.name: tuple(found[op.name, k] for k in range(len(op.outputs)))
        for op in graph.get_operations()
    }


def _traced_shapes(node: Any, trace: Any, needed: set[str]) -> list[Any]:
    """Shapes of what a call returns, or of an argument.

    TensorFlow drops results of a call that nothing needs, and numbers the others anew.
    """
    if node.op == "_Arg":
        return [trace.inputs[node.attr["index"].i].shape.as_proto()]
    outputs = trace.get_operation_by_name(node.name).outputs
    if len(outputs) != len(node.attr["Tout"].list.type):
        outputs = [t for t in outputs if any(c.name in needed for c in t.consumers())]
    return [t.shape.as_proto() for t in outputs]


def _needed(trace: Any) -> set[str]:
    """Names of the traced operations on which results or side effects depend."""
    found: set[str] = set()
    stack = [*trace.control_outputs, *(t.op for t in trace.outputs)]
    while stack:
        op = stack.pop()
        if op.name not in found:
            found.add(op.name)
            stack += [*op.control_inputs, *(t.op for t in op.inputs)]
    return found


def _nbytes(tensor: Any) -> int | None:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    if not tensor.shape.is_fully_defined():
        return None
    return tensor.shape.num_elements() * tensor.dtype.size
