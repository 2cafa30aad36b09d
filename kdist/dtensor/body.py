"""A traced function as a list of nodes, to take some out and to put others in.

A function definition names the tensors that its nodes read: `argument`, or `node:output:number`.
Shapes and dtypes are those of the traced graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import dtensor_internals, said_shapes
from kdist.dtensor.collectives import COLLECTIVES
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.experimental import dtensor

TAG = "_kdist_operation"
_names = (f"kdist_traced_{i}" for i in itertools.count())


class Body:
    """The nodes of a traced function; they may be changed.

    Args:
        concrete: The concrete function.

    Attributes:
        concrete: The same.
        nodes: By name, in the order of the trace.
        operations: Of the traced graph, by the name of their node.
        inputs: References of the flat inputs, captures last.
        handles: Those of resources, such as a summary's file, which DTensor is not given.
        results: References of the flat results.
        specs: Shape and dtype of each tensor that is read, by reference; see `note`.
        made: By name of a node, references of what it makes, as far as it is read.
        said: Whether nodes were added that check what `set_shape` said in the trace.
        functions: Definitions of the functions that nodes call, directly or not, by name.
    """

    def __init__(self, concrete: Any) -> None:
        self.concrete = concrete
        definition, graph = concrete.function_def, concrete.graph
        self.nodes: dict[str, Any] = {node.name: node for node in definition.node_def}
        signature = definition.signature
        self.inputs = [one.name for one in signature.input_arg]
        self.results = [definition.ret[one.name] for one in signature.output_arg]
        self.specs: dict[str, tf.TensorSpec] = {}
        self.made: dict[str, list[str]] = {}
        for reference, tensor in zip(self.inputs, concrete.inputs, strict=True):
            self.note(reference, tensor.shape, tensor.dtype)
        self.handles = [r for r in self.inputs if self.specs[r].dtype == tf.resource]
        made = [*zip(self.results, concrete.outputs, strict=True)]
        for reference, tensor in made:
            self.note(reference, tensor.shape, tensor.dtype)
        given = {tensor.op for tensor in concrete.inputs}
        # In the same order; some names differ, so that none is that of an argument.
        operations = [one for one in graph.get_operations() if one not in given]
        self.operations: Mapping[str, Any] = dict(zip(self.nodes, operations, strict=True))
        for name, operation in self.operations.items():
            for reference, tensor in zip(
                data_inputs(self.nodes[name]), operation.inputs, strict=True
            ):
                self.note(reference, tensor.shape, tensor.dtype)
                made.append((reference, tensor))
        self.said = self._keep_said_shapes(made)
        library = graph.as_graph_def().library.function
        self.functions: Mapping[str, Any] = {one.signature.name: one for one in library}
        self.drop_unused()

    def note(self, reference: str, shape: Any, dtype: Any) -> None:
        """Keeps the shape and dtype of a tensor, if they are not known."""
        if reference not in self.specs:
            self.specs[reference] = tf.TensorSpec(shape, dtype)
            self.made.setdefault(node_of(reference), []).append(reference)

    def _keep_said_shapes(self, made: Sequence[tuple[str, Any]]) -> bool:
        """Has operations check the shapes that `set_shape` alone knows; whether there are any.

        What is made of the nodes infers shapes anew.

        Args:
            made: References, and the tensors that they are.
        """
        before = said_shapes.noted(self.concrete.graph)
        said = {r: (t.op.name, t.value_index) for r, t in made} if before else {}
        known = {r: before[place] for r, place in said.items() if place in before}
        readers = [*self.nodes]
        instead = {reference: self._checked(reference, shape) for reference, shape in known.items()}
        self.redirect(instead, readers)
        return bool(instead)

    def redirect(self, instead: Mapping[str, str], readers: Iterable[str]) -> None:
        """Has nodes, of these names, and results read other tensors.

        Args:
            instead: By reference, the other one's; by `^name`, what is waited for instead.
            readers: Names of the nodes.
        """
        for name in readers:
            node = self.nodes[name]
            if any(one in instead for one in node.input):
                self.nodes[name] = copy = node_def_pb2.NodeDef()
                copy.CopyFrom(node)
                copy.input[:] = [instead.get(one, one) for one in node.input]
        self.results = [instead.get(one, one) for one in self.results]

    def lay_out(self, reference: str, layout: dtensor.Layout, name: str) -> str:
        """Adds a re-layout of a tensor, which nothing reads yet; returns its result."""
        spec = self.specs[reference]
        node = node_def_pb2.NodeDef(name=name, op="Relayout", input=[reference])
        node.attr["T"].type = spec.dtype.as_datatype_enum
        node.attr["layout"].s = layout.to_string().encode()
        self.nodes[name] = node
        made = f"{name}:output:0"
        self.note(made, spec.shape, spec.dtype)
        return made

    def add_constant(self, name: str, value: Any) -> str:
        """Adds a constant, which nothing reads yet; returns its reference. An int is an int32."""
        array = np.asarray(value, np.int32) if isinstance(value, int) else value
        node = node_def_pb2.NodeDef(name=name, op="Const")
        proto = tf.make_tensor_proto(array)
        node.attr["dtype"].type = proto.dtype
        node.attr["value"].tensor.CopyFrom(proto)
        self.nodes[name] = node
        reference = f"{name}:output:0"
        self.note(reference, array.shape, array.dtype)
        return reference

    def _checked(self, reference: str, before: tf.TensorShape) -> str:
        """Adds what checks the shape of a tensor, of which less is known without; its reference."""
        spec = self.specs[reference]
        node = node_def_pb2.NodeDef(
            name=f"{reference.replace(':', '_')}_as_said", op="EnsureShape", input=[reference]
        )
        node.attr["T"].type = spec.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
        self.nodes[node.name] = node
        self.specs[reference] = tf.TensorSpec(before, spec.dtype)
        checked = f"{node.name}:output:0"
        self.note(checked, spec.shape, spec.dtype)
        return checked

    def drop_unused(self) -> None:
        """Drops the nodes that neither a result nor an effect needs."""
        needed: set[str] = set()
        effects = [name for name, node in self.nodes.items() if self.has_effects(node)]
        waiting = [*self.results, *effects]
        while waiting:
            name = node_of(waiting.pop())
            if name in self.nodes and name not in needed:
                needed.add(name)
                waiting.extend(self.nodes[name].input)
        self.nodes = {name: node for name, node in self.nodes.items() if name in needed}

    def read_by(self, node: Any) -> list[tf.TensorSpec]:
        """Shapes and dtypes of what a node reads."""
        return [self.specs[one] for one in data_inputs(node)]

    def made_by(self, node: Any) -> list[tf.TensorSpec]:
        """Shapes and dtypes of what a node makes, as far as it is read."""
        return [self.specs[one] for one in self.made.get(node.name, ())]

    def readers(self) -> dict[str, list[str]]:
        """By reference, the nodes that read a tensor."""
        found: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            for reference in data_inputs(node):
                found.setdefault(reference, []).append(name)
        return found

    def called(self, node: Any) -> Iterator[Any]:
        """Definitions of the functions that a node calls, and those that these call."""
        seen: set[str] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            functions = (f for value in one.attr.values() for f in (value.func, *value.list.func))
            # An operation of TensorFlow 1's functions, such as `ctc_loss`, has a function's name.
            for name in (one.op, *(function.name for function in functions)):
                if name in self.functions and name not in seen:
                    seen.add(name)
                    yield self.functions[name]
                    waiting.extend(self.functions[name].node_def)

    def constant(self, reference: str) -> np.ndarray | None:
        """The value of a constant, None of any other tensor."""
        node = self.nodes.get(node_of(reference))
        if node is None or node.op != "Const":
            return None
        return tf.make_ndarray(node.attr["value"].tensor)

    def has_effects(self, node: Any) -> bool:
        """Whether a node, or a function that it calls, does something besides returning values."""
        bodies = list(self.called(node))
        if not bodies:
            return dtensor_internals.has_effects(node.op)
        inner = (one for body in bodies for one in body.node_def if not any(self.called(one)))
        return any(dtensor_internals.has_effects(one.op) for one in inner)

    def definition(
        self,
        inputs: Mapping[str, tf.TensorSpec],
        results: Iterable[str],
        left_out: Iterable[str] = (),
        tagged: Mapping[str, int] | None = None,
    ) -> Any:
        """A function definition of the nodes.

        Args:
            inputs: Its parameters; references to tensors of nodes that are left out are parameters
                too.
            results: References of its results.
            left_out: Names of nodes that it does not have.
            tagged: Numbers to write on nodes, by name.
        """
        left_out, tagged = set(left_out), tagged or {}
        made = function_pb2.FunctionDef()
        made.signature.name = next(_names)
        names = {reference: f"in_{i}" for i, reference in enumerate(inputs)}
        for reference, spec in inputs.items():
            made.signature.input_arg.add(name=names[reference], type=spec.dtype.as_datatype_enum)
        for name, node in self.nodes.items():
            if name in left_out:
                continue
            copy = made.node_def.add()
            copy.CopyFrom(node)
            copy.ClearField("experimental_debug_info")
            waits = [one for one in control_inputs(node) if node_of(one) not in left_out]
            del copy.input[:]
            copy.input.extend([names.get(one, one) for one in data_inputs(node)] + waits)
            if name in tagged:
                copy.attr[TAG].i = tagged[name]
            if self.has_effects(node):
                made.signature.control_output.append(name)
                made.control_ret[name] = name
        for i, reference in enumerate(results):
            dtype = self.specs[reference].dtype.as_datatype_enum
            made.signature.output_arg.add(name=f"out_{i}", type=dtype)
            made.ret[f"out_{i}"] = names.get(reference, reference)
        return made


def data_inputs(node: Any) -> list[str]:
    """What a node reads."""
    return [one for one in node.input if not one.startswith("^")]


def control_inputs(node: Any) -> list[str]:
    """What a node waits for."""
    return [one for one in node.input if one.startswith("^")]


def topological(nodes: Mapping[str, Any]) -> list[str]:
    """Names of nodes, what goes into one before it.

    Edges between collectives only order them; around an island they may lead back.
    """

    def inputs_of(name: str) -> Iterator[str]:
        node = nodes[name]
        return (r for r in node.input if node.op not in COLLECTIVES or not r.startswith("^"))

    order: list[str] = []
    seen: set[str] = set()
    for start in nodes:
        stack = [(start, inputs_of(start))] if start not in seen else []
        seen.add(start)
        while stack:
            name, inputs = stack[-1]
            following = next(
                (n for n in map(node_of, inputs) if n in nodes and n not in seen), None
            )
            if following is None:
                order.append(name)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, inputs_of(following)))
    return order
