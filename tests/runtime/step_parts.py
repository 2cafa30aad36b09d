"""What each tensor of an executed training step is, so that every transfer can be accounted for.

While a step is traced, the functions of the engine that make its parts are watched: each operation
gets the name of the part in which it was made, and what the programs of the slices return is noted
tensor by tensor. Nothing is added to the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat import dtensor_internals
from kdist.api.attached import attached
from kdist.dtensor.inputs import SliceInputs
from kdist.graphs import executed
from kdist.graphs.executed import ExecutedFunction, ExecutedNode, ExecutedTransfer
from kdist.optimizer import broadcast, when_due
from kdist.optimizer.compressed import CompressedGradients
from kdist.optimizer.gather import Gatherer
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.optimizer.update import DistributedUpdate
from kdist.plan.bucket import Bucket
from kdist.report.step_graph import CALLS, stitched_output
from kdist.runtime import plain_runner, step
from kdist.storage import sparse

import keras
import tensorflow as tf

_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (step.Step, "split", "data"),
    (SliceInputs, "data", "data"),
    (DistributedUpdate, "apply", "update"),
    (Reduction, "advance", "update"),
    (Gatherer, "__call__", "gather"),
    (when_due, "send_values", "value"),
    (broadcast, "_leaving_part", "bucket's join"),
    (broadcast, "_join", "bucket's value"),
    (broadcast, "_send_bucket", "bucket's value"),
    (broadcast, "_send_changed", "changed rows"),
    (Bucket, "messages", "bucket's gradient"),
    (CompressedGradients, "bucket", "compressed"),
    (CompressedGradients, "unit", "compressed"),
    (step.Step, "_logs", "metric"),
    (sparse, "restrict", "rows"),
    (SliceGradients, "_rows_of_table", "rows"),
    (plain_runner, "row_shares", "share"),
    (plain_runner.PlainRunner, "_broadcast_rows", "share"),
    (step, "combine", "state"),
)


class Parts:
    """The parts of the step that was traced last."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.graph: Any = None
        """The traced step."""
        self.made_in: dict[str, str] = {}
        self.results: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def note(self, tensor: Any, what: str) -> None:
        """Remembers what a tensor of the step's graph is."""
        for t in tf.nest.flatten(tensor, expand_composites=True):
            if t is not None:
                self.results.setdefault(_key(t), what)
                if t.shape.is_fully_defined():
                    self.shapes[_key(t)] = tuple(t.shape)

    def explain(self, sent: ExecutedTransfer) -> str:
        """What a transfer is for; "unexplained: ..." if nobody knows."""
        if sent.control:
            return "control"
        sent = self.inlined(sent)
        if sent.tensor in self._kept_results:
            return self.results[self._kept_results[sent.tensor]]
        if (sent.tensor, sent.target) in self._inner_sends:
            return "inner"
        if sent.tensor in self._stitched_results:
            return self.results[self._stitched_results[sent.tensor]]
        if sent.op == "_Arg":
            return "data"
        variable = self._variable_read_by(sent.node)
        made_in = self._made_in(sent.node)
        if variable in ("learning rate", "iterations", "seed"):
            return variable
        if variable == "weight" and made_in != "bucket's join":
            return "value" if made_in.endswith("value") else "gather"
        if made_in in ("update", "value", "compressed") and self._part_of(sent.node) is not None:
            return str(self._part_of(sent.node))
        if made_in.startswith("bucket's"):
            return made_in.removeprefix("bucket's ")
        known = ("gather", "rows", "changed rows", "data", "metric", "share", "state", "compressed")
        if made_in in known:
            return made_in
        return f"unexplained: {sent.tensor} ({sent.op}) made in {made_in or 'no part'!r}"

    def _made_in(self, node: str) -> str:
        """The part that made a node; or the part that passes it on, where its identity is gone."""
        made_in = self.made_in.get(node, "")
        if made_in != "update":
            return made_in
        consumers = [
            c for t in self.graph.get_operation_by_name(node).outputs for c in t.consumers()
        ]
        passed = [self.made_in.get(c.name, "") for c in consumers if c.type == "Identity"]
        return next((part for part in passed if part.startswith("bucket's")), made_in)

    def table(self, function: ExecutedFunction) -> dict[str, int]:
        """Number of transfers by what they are."""
        return dict(Counter(self.explain(t) for t in function.transfers))

    def nbytes(self, function: ExecutedFunction, what: str) -> int:
        """Bytes of the transfers of one kind; every shape must be known."""
        total = 0
        for t in function.transfers:
            if self.explain(t) == what:
                total += self._shape(self.inlined(t)).num_elements() * tf.as_dtype(t.dtype).size
        return total

    def _shape(self, sent: ExecutedTransfer) -> tf.TensorShape:
        """From the trace, which knows the shapes of what calls return; or as executed."""
        traced = self._kept_results.get(sent.tensor, sent.tensor)
        traced = self._stitched_results.get(sent.tensor, traced)
        shape = self.shapes.get(traced, sent.shape)
        if shape is None:
            name = sent.tensor if ":" in sent.tensor else f"{sent.tensor}:0"
            shape = self.graph.get_tensor_by_name(name).shape
        return tf.TensorShape(shape)

    @functools.cached_property
    def _kept_results(self) -> dict[str, str]:
        """Names of results as executed, to their names as traced.

        TensorFlow drops a call's outputs that nobody needs, and numbers the others anew.
        """
        stack = [*self.graph.control_outputs, *(t.op for t in self.graph.outputs)]
        needed: set[Any] = set()
        while stack:
            operation = stack.pop()
            if operation not in needed:
                needed.add(operation)
                stack += [*operation.control_inputs, *(t.op for t in operation.inputs)]
        renamed = {}
        for name in self.results:
            node, _, output = name.partition(":")
            outputs = self.graph.get_operation_by_name(node).outputs
            kept = [any(c in needed for c in t.consumers()) for t in outputs]
            position = sum(kept[: int(output or 0)])
            if kept[int(output or 0)]:
                renamed[f"{node}:{position}" if position else node] = name
        return renamed

    @functools.cached_property
    def _stitched_calls(self) -> list[str]:
        """Names of the calls of programs over inner axes."""
        calls = [one for one in self.graph.get_operations() if one.type in CALLS and one.outputs]
        return [one.name for one in calls if stitched_output(one.outputs[0]) is not None]

    @functools.cached_property
    def _inner_sends(self) -> set[tuple[str, str]]:
        """What programs over inner axes send between their own devices: tensor and target."""
        found = set()
        for name in self._stitched_calls:
            operation = self.graph.get_operation_by_name(name)
            definition = dtensor_internals.function_def(operation.get_attr("f").name)
            nodes = {node.name: node for node in definition.node_def}
            devices = {node.device for node in definition.node_def}
            for node in definition.node_def:
                # TensorFlow may join what a collective joins where it is used.
                targets = devices if "/group" in node.name else {node.device}
                for reference in node.input:
                    source = reference.lstrip("^")
                    while (made := nodes.get(source.split(":")[0])) and made.op == "Identity":
                        source = made.input[0]
                    if made is not None:
                        found |= {(_sent_as(source), one) for one in targets - {made.device}}
        return found

    @functools.cached_property
    def _stitched_results(self) -> dict[str, str]:
        """Names of what makes a result inside a program over inner axes, to its name as traced.

        As transfers are named: without the call in whose place the program's nodes are.
        """
        found = {}
        noted = {self._copied(name): name for name in self.results}
        for operation in self.graph.get_operations():
            for tensor in operation.outputs:
                made = stitched_output(tensor)
                if made is not None and _key(tensor) in noted:
                    name = made[0].removeprefix(f"{operation.name}/")
                    found[_sent_as(f"{name}:{made[1]}")] = noted[_key(tensor)]
        return found

    def _copied(self, name: str) -> str:
        """The tensor that a result is a copy of."""
        node, _, position = name.partition(":")
        tensor = self.graph.get_operation_by_name(node).outputs[int(position or 0)]
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        return _key(tensor)

    def _variable_read_by(self, node: str) -> str:
        try:
            operation = self.graph.get_operation_by_name(node)
        except KeyError:
            return ""
        return self._variable(operation) if operation.type == "ReadVariableOp" else ""

    def updated_weight(self, node: ExecutedNode) -> int:
        """Bytes of the local variable of a weight that the optimizer writes by an assignment.

        Args:
            node: An assignment; it may be in the body of a function that the update calls.

        Returns:
            0 for an assignment of another variable, or by something else.
        """
        if self.made_in.get(node.call or node.name) != "update":
            return 0
        operation = self.graph.get_operation_by_name(node.call or node.name)
        handle = operation.inputs[0]
        if node.call:
            body = dtensor_internals.function_def(operation.get_attr("f").name)
            assigned = next(one.input[0] for one in body.node_def if one.name == node.name)
            names = [one.name for one in body.signature.input_arg]
            handle = operation.inputs[names.index(assigned)]
        handle = _outermost(handle)
        for entry in attached(self.model).entries.values():
            kept = [*entry.locals.values(), *(v for _, v in entry.masters)]
            for value in (v._value for v in kept if v._value.handle is handle):
                return value.shape.num_elements() * value.dtype.size
        return 0

    def _variable(self, operation: Any) -> str:
        """What the variable is that an operation reads or writes."""
        handle = _outermost(operation.inputs[0])
        parallel = attached(self.model)
        jobs = parallel.update.jobs
        known: dict[str, list[Any]] = {
            "learning rate": [self.model.optimizer._learning_rate],
            "iterations": [one.iterations() for group in jobs.local for one in group],
            "seed": list(attached(self.model).program.state.seeds),
            "weight": [v for e in parallel.entries.values() for v in e.locals.values()]
            + [v for e in parallel.entries.values() for _, v in e.masters],
        }
        for what, variables in known.items():
            if any(v._value is not None and v._value.handle is handle for v in variables):
                return what
        return "another variable"

    def _part_of(self, node: str) -> str | None:
        """What a slice of a tensor that travels is a part of: "gradient" or "value"."""
        operation = self.graph.get_operation_by_name(node)
        if operation.type != "StridedSlice":
            return None
        whole = operation.inputs[0]
        while whole.op.type == "Identity":
            whole = whole.op.inputs[0]
        if whole.op.type == "ReadVariableOp" and self._variable_read_by(whole.op.name) == "weight":
            return "value"
        return self.results.get(_key(whole))

    def inlined(self, sent: ExecutedTransfer) -> ExecutedTransfer:
        """A transfer of a function that was inlined into another, by its own names."""
        name = sent.tensor
        within = [one for one in self._stitched_calls if name.startswith(f"{one}/")]
        if within:
            return dataclasses.replace(sent, tensor=name.removeprefix(f"{within[0]}/"))
        while name.split(":")[0] not in self.made_in and "/" in name:
            prefix, rest = name.split("/", 1)
            if not _CALL.fullmatch(prefix):
                break
            name = rest
        return dataclasses.replace(sent, tensor=name)


def _sent_as(reference: str) -> str:
    """As `Transfer.tensor` writes what a function definition calls `node:output:number`."""
    node, *numbers = reference.split(":")
    return f"{node}:{numbers[-1]}" if numbers and numbers[-1] != "0" else node


def _key(tensor: Any) -> str:
    """As `Transfer.tensor` writes it: the first output without its number."""
    return str(tensor.name).removesuffix(":0")


def _outermost(tensor: Any) -> Any:
    """The tensor that nested functions captured."""
    while not hasattr(tensor, "numpy") and hasattr(tensor, "graph"):
        outer = [e for e, inner in getattr(tensor.graph, "captures", ()) if inner is tensor]
        if not outer:
            return tensor
        tensor = outer[0]
    return tensor


@contextlib.contextmanager
def recording(model: keras.Model) -> Iterator[Parts]:
    """Notes the parts of the steps that are traced within the block."""
    parts = Parts(model)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _PARTS]
    finish = step.Step.finish_training
    for (owner, name, label), (_, _, function) in zip(_PARTS, before, strict=True):
        setattr(owner, name, _labelling(parts, label, function))
    step.Step.finish_training = _noting(parts, finish)  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        step.Step.finish_training = finish  # type: ignore[method-assign]


def _labelling(parts: Parts, label: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return function(*args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        result = function(*args, **kwargs)
        for operation in graph.get_operations()[start:]:
            parts.made_in.setdefault(operation.name, label)
        return result

    return wrapped


def _noting(parts: Parts, function: Callable) -> Callable:
    """Notes what came from the slices before everything after them is traced."""

    @functools.wraps(function)
    def wrapped(self: Any, batch: Any, found: Any, *more: Any) -> Any:
        parts.graph = tf.compat.v1.get_default_graph()
        for result in found.slices:
            parts.note(_of_tables(result.gradients), "rows")
            parts.note(result.gradients, "gradient")
            parts.note(found.loss if result.loss is None else result.loss, "loss")
            parts.note(result.terms, "loss")
            parts.note(result.outputs, "outputs")
            parts.note(result.updated, "state")
        parts.note([(y, w) for _, y, w in batch.parts], "data")
        return function(self, batch, found, *more)

    return wrapped


def _of_tables(gradients: Any) -> list[Any]:
    """Gradients that are rows: `IndexedSlices`, or per device of a mesh (values, indices)."""
    if isinstance(gradients, dict):
        return [rows for one in gradients.values() for rows in _of_tables(one)]
    if isinstance(gradients, tf.IndexedSlices):
        return [gradients]
    if isinstance(gradients, tuple) and len(gradients) == 2:
        return [gradients]
    if isinstance(gradients, list | tuple):
        return [rows for one in gradients for rows in _of_tables(one)]
    return []


def first_step(model: keras.Model, x: Any, y: Any) -> tuple[Parts, list[ExecutedFunction]]:
    """Trains one batch, the model's first; returns its parts and everything it executed."""
    with recording(model) as parts:
        functions = executed.watch(lambda: model.train_on_batch(x, y))
    return parts, functions
