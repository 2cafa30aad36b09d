"""The graph of a training step as TensorFlow executes it, for `kdist.graphs.live_tensors`.

TensorFlow hands out executed graphs only of functions that run for the first time. So the step is
traced once more and run, on zeros, and every variable that it can write gets its value back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from kdist._compat import dtensor_internals, function_graphs, run_metadata
from kdist.dtensor.copies import PREFIX
from kdist.graphs.chunks import node_of
from kdist.graphs.executed import importable, imported
from kdist.graphs.live_tensors import RECEIVES, LiveTensors, Op, Output
from kdist.program.step_result import StepResult
from kdist.report.folded import is_folded
from kdist.report.inside_calls import CALLS, GIVEN, Opener
from kdist.sharding.device import Device
from kdist.storage.fetched_table import taking_any_ids
from kdist.storage.parts import InParts

import keras
import tensorflow as tf

_SENDS = ("_Send", "_HostSend")
_SHAPES = "_output_shapes"


def live_tensors(
    step: Any,
    batch: Any,
    parameters: Sequence[keras.Variable],
    *,
    shared_memory: bool,
) -> LiveTensors:
    """What may be alive at once in a training step.

    Args:
        step: A `kdist.runtime.step.Step`.
        batch: (x, y, sample_weight), concrete tensors. Their values do not matter.
        parameters: The local variables that are (parts of) weights.
        shared_memory: See `LiveTensors`.
    """
    noted: list[Any] = []
    with _noting_gradients(step, noted), taking_any_ids():
        function = tf.function(lambda data: step.train(data), autograph=False)
        concrete = function.get_concrete_function(batch)
    with _kept(concrete.captured_inputs), step.prepared():
        graphs = run_metadata.function_graphs(lambda: concrete(batch))
    largest = max(graphs, key=lambda g: sum(len(p.node) for p in g.partition_graphs))
    handles = {id(v.value.handle) for v in parameters}
    reads = _of_variables(concrete, handles, "ReadVariableOp")
    writes = _of_variables(concrete, handles, "AssignVariableOp")
    programs = _calls_before(noted)

    def read(inside: bool) -> LiveTensors:
        executed = ExecutedGraph(largest, concrete.graph, inside=inside)
        gradients = [o for tensor in noted if (o := executed.output(tensor))]
        return LiveTensors(
            executed.ops(),
            gradients,
            reads,
            writes=writes,
            shared_memory=shared_memory,
            programs=programs,
            closed=executed.closed,
        )

    found = read(inside=False)
    found.opened = functools.cache(lambda: read(inside=True))
    return found


def _calls_before(gradients: Sequence[Any]) -> set[str]:
    """Names of the calls that gradients depend on: those of the model's programs."""
    parts = [t.values if isinstance(t, tf.IndexedSlices) else t for t in gradients]
    waiting, seen = [t.op for t in parts], set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            waiting.extend(t.op for t in op.inputs)
    graph = parts[0].graph if parts else None
    return {n for n in seen if graph.get_operation_by_name(n).type in CALLS}  # type: ignore[union-attr]


@contextlib.contextmanager
def _noting_gradients(step: Any, noted: list[Any]) -> Iterator[None]:
    """Meanwhile, notes the gradients that the slices computed."""
    original = step.apply_result

    def apply_result(result: StepResult, *more: Any) -> None:
        # Lists by variable; in a pipeline, dicts by slice and variable.
        once = [
            [part for _, part in one.parts] if isinstance(one, InParts) else one
            for one in result.once.values()
        ]
        found = [[one.gradients for one in result.slices], once]
        noted.extend(g for g in tf.nest.flatten(found) if g is not None)
        original(result, *more)

    step.apply_result = apply_result
    try:
        yield
    finally:
        del step.apply_result


@contextlib.contextmanager
def _kept(captured: Sequence[Any]) -> Iterator[None]:
    """Gives variables back what they had before, whatever is written meanwhile."""
    handles = [t for t in captured if t.dtype == tf.resource]
    values = []
    for handle in handles:
        dtype = function_graphs.variable_dtype(handle)
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


def _of_variables(concrete: Any, handles: set[int], kind: str) -> list[str]:
    """Names of the operations of a kind that act on some variables."""
    inside = {id(inner) for outer, inner in concrete.graph.captures if id(outer) in handles}
    return [
        op.name
        for op in concrete.graph.get_operations()
        if op.type == kind and id(op.inputs[0]) in inside
    ]


class ExecutedGraph:
    """A function as it was executed, on all devices, and as it was traced.

    Args:
        function: Its `RunMetadata.FunctionGraphs`.
        trace: The graph that was traced, which knows the shapes of what calls return.
        inside: Whether nodes of functions that it calls are its own.

    Attributes:
        closed: Calls of which that was wanted, and what is inside is not known.
    """

    def __init__(self, function: Any, trace: Any, *, inside: bool = False) -> None:
        self._trace = trace
        self._traced = {one.name: one for one in trace.get_operations()}
        self._needed = _needed(trace)
        self.closed: frozenset[str] = frozenset()
        every = [node for graph in function.partition_graphs for node in graph.node]
        if inside:
            graphs = (function.pre_optimization_graph, function.post_optimization_graph)
            library = {f.signature.name: f for one in graphs for f in one.library.function}
            before = {node.name: node for node in function.pre_optimization_graph.node}
            opener = Opener(library, before, self._needed_outputs, self._folded)
            every = list(opener.opened(every))
            self.closed = frozenset(opener.closed)
        self._inside = inside
        self._sent = {_edge(node): node.input[0] for node in every if node.op in _SENDS}
        self._nodes = {node.name: node for node in every if node.op not in _SENDS}
        self._library = function.post_optimization_graph.library

    def ops(self) -> list[Op]:
        """Its operations."""
        sizes = _sizes(self._joined())
        return [self._op(node, sizes[name]) for name, node in self._nodes.items()]

    def output(self, tensor: Any) -> Output | None:
        """Where a traced tensor is in the executed graph; of rows, their values."""
        if isinstance(tensor, tf.IndexedSlices):
            tensor = tensor.values
        inside = stitched_output(tensor)
        if inside is not None:
            return inside if inside[0] in self._nodes else None
        node = self._nodes.get(tensor.op.name)
        opened_call = self._inside and tensor.op.type in CALLS
        if node is None or (node.op not in CALLS and not opened_call):
            return tensor.op.name, tensor.value_index
        places = [k for k, t in enumerate(self._kept(node)) if t is tensor]
        return (node.name, places[0]) if places else None

    def _op(self, node: Any, nbytes: tuple[int, ...]) -> Op:
        names = [self._sent[_edge(node)]] if node.op in RECEIVES else list(node.input)
        if (given := self._nodes.get(node.name + GIVEN)) is not None:
            # A call holds what it was given until it ends.
            taken = [n for n in given.input if not n.startswith("^")]
            names += [f"{given.name}:{i}" for i in range(len(taken))]
        return Op(
            name=node.name,
            kind=node.op,
            device=Device.parse(node.device).name,
            inputs=tuple(_output(n) for n in names if not n.startswith("^")),
            waits=tuple(n[1:] for n in names if n.startswith("^")),
            nbytes=nbytes,
            call=node.op in CALLS,
        )

    def _joined(self) -> Any:
        """One graph of all devices', with the shapes that only the trace knows."""
        whole = tf.compat.v1.GraphDef(library=self._library)
        for node in self._nodes.values():
            copy = whole.node.add()
            copy.CopyFrom(node)
            copy.device = ""
            noted = list(copy.attr.pop(_SHAPES).list.shape) if _SHAPES in copy.attr else []
            known = []
            if node.op in RECEIVES:
                copy.op = "Identity"
                copy.input[:] = [self._sent[_edge(node)]]
                copy.attr.clear()
                copy.attr["T"].CopyFrom(node.attr["tensor_type"])
            elif node.op == "_Arg":
                known = [self._trace.inputs[node.attr["index"].i].shape.as_proto()]
            elif node.op in CALLS and node.name in self._traced:
                known = [t.shape.as_proto() for t in self._kept(node)]
            elif node.op in CALLS and len(noted) == len(node.attr["Tout"].list.type):
                known = noted  # inside a program over inner axes
            if known:
                copy.attr[_SHAPES].list.shape.extend(known)
        return whole

    def _kept(self, node: Any) -> list[Any]:
        """What a call returns: TensorFlow drops what nothing needs, and numbers the rest anew."""
        outputs = list(self._traced[node.name].outputs)
        kind = "Tout" if node.op in CALLS else "T"
        if len(outputs) == len(node.attr[kind].list.type):
            return outputs
        return [outputs[i] for i in self._needed_outputs(node.name) or ()]

    def _folded(self, call: str, argument: int) -> tf.TensorShape | None:
        """The shape of what a traced call is given, if its value is known; see `Opener`."""
        given = self._traced[call].inputs[argument] if call in self._traced else None
        return given.shape if given is not None and is_folded(given) else None

    def _needed_outputs(self, call: str) -> list[int] | None:
        """Which outputs of a traced call something needs; None of one that was not traced."""
        if call not in self._traced:
            return None
        outputs = self._traced[call].outputs
        needed = [any(c.name in self._needed for c in t.consumers()) for t in outputs]
        return [i for i, there in enumerate(needed) if there]


def stitched_output(tensor: Any) -> Output | None:
    """Where a result of a program over inner axes is made, once its nodes are in the step's graph.

    Args:
        tensor: A tensor of the traced step.

    Returns:
        The operation and its output; None of a tensor that no such program makes.
    """
    name = tensor.op.get_attr("f").name if tensor.op.type in CALLS else ""
    if not name.startswith(PREFIX):
        return None
    definition = dtensor_internals.function_def(name)
    if definition.attr["_noinline"].b:
        return None
    nodes = {node.name: node for node in definition.node_def}
    result = definition.signature.output_arg[tensor.value_index].name
    reference = definition.ret[result]
    # Copies are left out when the graph is optimized.
    while (node := nodes.get(node_of(reference))) is not None and node.op == "Identity":
        reference = node.input[0]
    if node_of(reference) not in nodes:  # an input, passed on
        names = [one.name for one in definition.signature.input_arg]
        given = tensor.op.inputs[names.index(reference)]
        return stitched_output(given) or (given.op.name, given.value_index)
    return f"{tensor.op.name}/{node_of(reference)}", int(reference.rpartition(":")[2])


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


def _edge(node: Any) -> tuple[bytes, bytes, bytes]:
    attr = node.attr
    return attr["tensor_name"].s, attr["send_device"].s, attr["recv_device"].s


def _output(name: str) -> Output:
    node, _, number = name.partition(":")
    return node, int(number or 0)


def _sizes(definition: Any) -> dict[str, tuple[int, ...]]:
    """Bytes of outputs. Where a shape depends on values: those of the largest input.

    That bounds what look-ups make: the distinct rows of a gradient are no more than its rows.
    """
    graph = imported(definition)
    names = {importable(node.name): node.name for node in definition.node}
    found: dict[Output, int] = {}
    for op in graph.get_operations():
        most = max([found.get((t.op.name, t.value_index), 0) for t in op.inputs], default=0)
        for k, tensor in enumerate(op.outputs):
            nbytes = _nbytes(tensor)
            found[op.name, k] = most if nbytes is None else nbytes
    return {
        names[op.name]: tuple(found[op.name, k] for k in range(len(op.outputs)))
        for op in graph.get_operations()
    }


def _nbytes(tensor: Any) -> int | None:
    """Bytes of a tensor, None if its shape depends on values; 0 of what is no memory."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    if not tensor.shape.is_fully_defined():
        return None
    return tensor.shape.num_elements() * tensor.dtype.size
