"""Which device computed what, and what travelled, read from the graphs that TensorFlow executed.

Losses stay right when all the work silently runs on the first device, and `op.device` of a traced
graph is mostly empty. So this reads the *partition graphs*: after placement and optimisation
TensorFlow cuts each function into one graph per device, where every node has its device and every
transfer is a `_Send` node.

A function that is kept as one node (`_noinline`) stays one call node there. Its body runs on the
device of that call, but for nodes that name a device of their own; `ExecutedFunction.nodes` lists
them so.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kdist._compat import run_metadata
from kdist.sharding.device import Device

import tensorflow as tf

_SENDS = ("_Send", "_HostSend")
_MOVES = (*_SENDS, "_Recv", "_HostRecv")
_CONTROL = "/ctrl/"
_BACKWARD = "gradient_tape/"
_SPECIALIZED = "_specialized_for_"
PRODUCTS = r"\w*(MatMul|Einsum|Conv[123][dD])\w*"
"""Operations that do the heavy work of a network: matrix products and convolutions.

A pattern, because TensorFlow fuses them and replaces them by those of oneDNN."""
ASSIGNMENTS = r"Assign(Add|Sub)?VariableOp|ResourceScatter\w+|ResourceApply\w+"
"""Operations that write a variable."""


@dataclasses.dataclass(frozen=True)
class ExecutedNode:
    """One executed operation.

    Attributes:
        name: Its name; in the body of a call, its name there.
        op: Its type, such as "MatMul".
        device: TensorFlow device string, such as "/device:CPU:3".
        call: Name of the call node in whose body it runs, outermost first with slashes; empty
            outside of calls.
        shape: Shape of its first output, None where the graph does not tell.
    """

    name: str
    op: str
    device: str
    call: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def backward(self) -> bool:
        """Whether a gradient tape made it; TensorFlow keeps that in the name."""
        return _BACKWARD in self.name


@dataclasses.dataclass(frozen=True)
class ExecutedTransfer:
    """One tensor sent from a device to another, or a control signal.

    Attributes:
        tensor: What is sent: name of the producing node, `name:k` for its output k > 0.
        op: Type of the producing node.
        source: Device it leaves.
        target: Device it reaches.
        dtype: Name of its dtype.
        shape: Its shape, None where the graph does not tell.
        control: True if it carries no value, only that something is done.
    """

    tensor: str
    op: str
    source: str
    target: str
    dtype: str
    shape: tuple[int, ...] | None
    control: bool = False

    @property
    def node(self) -> str:
        """Name of the producing node."""
        return self.tensor.split(":")[0]

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor, None where its shape is not known; 0 of a control signal."""
        if self.control:
            return 0
        if self.shape is None:
            return None
        return math.prod(self.shape) * tf.as_dtype(self.dtype).size


@dataclasses.dataclass(frozen=True)
class ExecutedFunction:
    """One function that ran, as TensorFlow executed it.

    Attributes:
        nodes: Its operations, those that only move tensors left out, with those of the bodies of
            its calls.
        transfers: What it sent between devices; between two devices of other processes it does not
            show.
    """

    nodes: tuple[ExecutedNode, ...]
    transfers: tuple[ExecutedTransfer, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices on which it ran nodes, in order."""
        return tuple(sorted({n.device for n in self.nodes}, key=Device.parse))

    def select(self, ops: str) -> list[ExecutedNode]:
        """Its nodes of some types.

        Args:
            ops: Regular expression for the whole type: `PRODUCTS`, `ASSIGNMENTS`, "MatMul".
        """
        return [n for n in self.nodes if re.fullmatch(ops, n.op)]

    def count(self, ops: str) -> dict[str, int]:
        """Number of nodes of some types per device; see `select`."""
        return dict(Counter(n.device for n in self.select(ops)))

    def sent(self) -> dict[tuple[str, str], int]:
        """Number of tensors sent per pair of devices, without control signals."""
        return dict(Counter((t.source, t.target) for t in self.transfers if not t.control))


def watch(call: Callable[[], Any]) -> list[ExecutedFunction]:
    """Runs something and reads the functions that ran for the first time.

    Args:
        call: Runs them, such as one training step. TensorFlow reports only functions whose first
            call it watches: build and compile before, train not.

    Returns:
        One entry per function, in the order in which they ran; operations that ran eagerly are
        functions of one node.

    Example:
        >>> functions = watch(lambda: model.train_on_batch(x, y))
        >>> step = largest(functions)
        >>> step.count(PRODUCTS)
        {'/device:CPU:0': 4, '/device:CPU:1': 4}
    """
    return [_read(graphs) for graphs in run_metadata.function_graphs(call)]


def largest(functions: list[ExecutedFunction]) -> ExecutedFunction:
    """The function with the most nodes: of a training step, the step.

    Raises:
        ValueError: There is none, because all had run before they were watched.
    """
    if not functions:
        raise ValueError(
            "No function ran for the first time. Watch the first step of a compiled model: "
            f"TensorFlow reports a function's first call only. Received: functions={functions}"
        )
    return max(functions, key=lambda f: len(f.nodes))


def computing_devices(functions: list[ExecutedFunction]) -> set[str]:
    """Devices that ran a matrix product or a convolution, in a body or outside of one."""
    return {n.device for f in functions for n in f.select(PRODUCTS)}


def _read(graphs: Any) -> ExecutedFunction:
    library = {
        f.signature.name: f
        for source in (graphs.pre_optimization_graph, graphs.post_optimization_graph)
        for f in source.library.function
    }
    shapes = _Shapes(graphs)
    nodes: list[ExecutedNode] = []
    transfers: list[ExecutedTransfer] = []
    # Of devices of other processes TensorFlow reports no graph: what they send shows where it
    # arrives here.
    reported = {node.device for graph in graphs.partition_graphs for node in graph.node}
    for graph in graphs.partition_graphs:
        ops = {node.name: node.op for node in graph.node}
        for node in graph.node:
            if node.op in _SENDS:
                transfers.append(_transfer(node, ops, shapes))
            elif node.op in _MOVES:
                if node.attr["send_device"].s.decode() not in reported:
                    transfers.append(_arrival(node, shapes))
            else:
                nodes.extend(_with_body(node, _device(node.device), "", library))
    return ExecutedFunction(tuple(nodes), tuple(transfers))


def _device(name: str) -> str:
    return Device.parse(name).name


def _with_body(
    node: Any, device: str, call: str, library: Mapping[str, Any]
) -> Iterator[ExecutedNode]:
    """A node and, if it calls functions, what these run."""
    yield ExecutedNode(node.name, node.op, device, call, _first_shape(node))
    inside = f"{call}/{node.name}" if call else node.name
    for value in node.attr.values():
        for function in (value.func, *value.list.func):
            body = library.get(function.name.split(_SPECIALIZED)[0])
            for inner in body.node_def if body is not None else ():
                own = _device(inner.device) if inner.device else device
                yield from _with_body(inner, own, inside, library)


def _first_shape(node: Any) -> tuple[int, ...] | None:
    shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
    if not shapes or shapes[0].unknown_rank or any(d.size < 0 for d in shapes[0].dim):
        return None
    return tuple(d.size for d in shapes[0].dim)


def _transfer(node: Any, ops: Mapping[str, str], shapes: _Shapes) -> ExecutedTransfer:
    tensor = node.attr["tensor_name"].s.decode()
    # The name is `edge_<number>_<tensor>`; the input says the same, with its output number.
    producer = node.input[0].lstrip("^")
    control = _CONTROL in tensor or _CONTROL in producer
    return ExecutedTransfer(
        tensor=producer,
        op=ops.get(producer.split(":")[0], ""),
        source=_device(node.attr["send_device"].s.decode()),
        target=_device(node.attr["recv_device"].s.decode()),
        dtype=tf.DType(node.attr["T"].type).name,
        shape=() if control else shapes.of(producer),
        control=control,
    )


def _arrival(node: Any, shapes: _Shapes) -> ExecutedTransfer:
    """A transfer from a device of which there is no graph."""
    tensor = node.attr["tensor_name"].s.decode()
    producer = tensor.split("_", 2)[-1]
    return ExecutedTransfer(
        tensor=producer,
        op="",
        source=_device(node.attr["send_device"].s.decode()),
        target=_device(node.attr["recv_device"].s.decode()),
        dtype=tf.DType(node.attr["tensor_type"].type).name,
        shape=() if _CONTROL in tensor else shapes.of(producer),
        control=_CONTROL in tensor,
    )


class _Shapes:
    """Shapes of the tensors of a function, inferred from its graph, on first use."""

    def __init__(self, graphs: Any) -> None:
        self._definition = graphs.post_optimization_graph
        self._graph: tf.Graph | None = None

    def of(self, tensor: str) -> tuple[int, ...] | None:
        """Shape of `name` or `name:k`, None if it cannot be told."""
        if self._graph is None:
            self._graph = imported(self._definition)
        name, _, output = importable(tensor).partition(":")
        try:
            found = self._graph.get_tensor_by_name(f"{name}:{output or 0}").shape
        except (KeyError, ValueError):
            return None
        return tuple(found.as_list()) if found.is_fully_defined() else None


def imported(definition: Any) -> tf.Graph:
    """The graph; of nodes with one name, which DTensor makes one of per device, the first."""
    unique = tf.compat.v1.GraphDef()
    unique.CopyFrom(definition)
    del unique.node[:]
    unique.node.extend({n.name: n for n in reversed(definition.node)}.values())
    for node in unique.node:
        node.name = importable(node.name)
        node.input[:] = map(importable, node.input)
        node.attr.pop("_class", None)  # of a call's body, by names that it had there
    try:
        return _graph(unique)
    except ValueError:
        # Optimisation may leave shapes at nodes that are not true any more.
        for node in unique.node:
            node.attr.pop("_output_shapes", None)
        return _graph(unique)


def importable(name: str) -> str:
    """A name that can be imported: TensorFlow makes some with a leading `_`, and takes none."""
    control, plain = ("^", name[1:]) if name.startswith("^") else ("", name)
    return f"{control}eager{plain}" if plain.startswith("_") else name


def _graph(definition: Any) -> tf.Graph:
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return graph
