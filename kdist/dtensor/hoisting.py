"""Tensors that a traced function makes of sizes alone: positions, causal masks, counts.

DTensor, which knows the sizes of an example, would make constants of them. Taken out of the
function they are inputs of it, and what makes them is a function of shapes (`kdist.dtensor.lifting`
puts it back).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.dtensor.lowering import positions
from kdist.dtensor.rewrites import with_dims_from_the_front
from kdist.dtensor.sizes import CannotLift, Examples, Shape, Shapes
from kdist.graphs.inferred import InferredShapes, imported

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

_SHAPES = frozenset({"Shape", "ShapeN", "Size"})
_INTEGERS = (tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class SizeTensor:
    """A tensor made of sizes alone.

    Attributes:
        function: Concrete function that makes it of shapes, int32 vectors.
        shapes: Each of these, in each example.
        spec: Its dtype, and as much of its shape as is known.
        examples: Its shape in each example.
    """

    function: Any
    shapes: tuple[Shapes, ...]
    spec: tf.TensorSpec
    examples: Shapes


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A traced function without what it made of sizes alone.

    Attributes:
        concrete: It takes the flat inputs and captures of the function, then those tensors; it
            gives the flat results.
        made: The tensors.
        shapes: Of all inputs, for each example.
        values: Of inputs that are integers and follow from sizes, for each example, by position.
        bounded: See `kdist.dtensor.sizes.Findings`.
        probes: The shape of each flat result, as far as it is known, in each probe.
        structure: The function's results, with positions of flat results as leaves.
    """

    concrete: Any
    made: tuple[SizeTensor, ...]
    shapes: tuple[Shapes, ...]
    values: tuple[Mapping[int, Any], ...]
    bounded: bool
    probes: tuple[tuple[Shape, ...], ...]
    structure: Any


def hoist(concrete: Any, inputs: Sequence[Examples | None]) -> Hoisted:
    """Takes out of a traced function what it makes of sizes alone.

    Small vectors of integers stay, since DTensor has to know them: shapes to reshape to, limits of
    slices.

    Args:
        concrete: The function.
        inputs: Of each flat input and capture; None where its shape is known.

    Raises:
        CannotLift: What has to be taken out depends on sizes that are not known from the examples.
    """
    definition = with_dims_from_the_front(concrete.graph)
    known = next(one for one in inputs if one is not None)
    count = len(known.shapes)
    given = [
        [tuple(t.shape) if e is None else e.shapes[i] for t, e in zip(concrete.inputs, inputs)]
        for i in range(count)
    ]
    far = [
        [tuple(t.shape) if e is None else e.probes[i] for t, e in zip(concrete.inputs, inputs)]
        for i in range(len(known.probes))
    ]
    values = [
        {p: e.values[i] for p, e in enumerate(inputs) if e is not None and e.values is not None}
        for i in range(count)
    ]
    names = [t.name for t in concrete.inputs]
    graphs = [InferredShapes(definition, concrete.inputs, shapes) for shapes in given]
    probes = [_probe(definition, concrete.inputs, shapes) for shapes in far]
    made_of_sizes = _made_of_sizes(concrete.graph)
    taken = _frontier(concrete, made_of_sizes, graphs[0])
    made = tuple(_made(t, graphs, definition) for t in taken)

    def call(*flat: Any) -> list[Any]:
        return imported(definition, [*names, *(t.name for t in taken)], flat, concrete.outputs)

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete.inputs]
    function = tf.function(call, autograph=False)
    return Hoisted(
        function.get_concrete_function(*specs, *(one.spec for one in made)),
        made,
        tuple((*shapes, *(m.examples[i] for m in made)) for i, shapes in enumerate(given)),
        tuple(values),
        _is_bounded(concrete.graph, graphs, [one for one in probes if one is not None]),
        tuple(tuple(_far_shape(t, one) for one in probes) for t in concrete.outputs),
        positions(concrete.structured_outputs),
    )


def _probe(definition: Any, inputs: Sequence[Any], shapes: Sequence[Any]) -> InferredShapes | None:
    """The graph for sizes far away; None if it cannot be for them."""
    try:
        return InferredShapes(definition, inputs, shapes)
    except ValueError:
        return None


def _far_shape(tensor: Any, probe: InferredShapes | None) -> Shape:
    """A tensor's shape in a probe, as far as it is known."""
    shape = None if probe is None else probe.shape(tensor)
    known = shape is not None and shape.rank is not None
    return tuple(shape) if known else (None,) * (tensor.shape.rank or 0)  # type: ignore[arg-type]


def _is_bounded(
    graph: tf.Graph, examples: Sequence[InferredShapes], probes: Sequence[InferredShapes]
) -> bool:
    """Whether some size is the same in all examples, and another one far from them."""
    for one in graph.get_operations():
        for tensor in one.outputs:
            if tensor.shape.rank is None or tensor.shape.is_fully_defined():
                continue
            near = [example.shape(tensor) for example in examples]
            far = [probe.shape(tensor) for probe in probes]
            if any(shape.rank is None for shape in (*near, *far)):
                continue
            for dim in range(tensor.shape.rank):
                sizes = {shape[dim] for shape in near}
                others = {shape[dim] for shape in far} - {None}
                if len(sizes) == 1 and None not in sizes and others - sizes:
                    return True
    return False


def _made_of_sizes(graph: tf.Graph) -> dict[str, bool]:
    """Names of the operations that take nothing but shapes and constants, and whether shapes."""
    found: dict[str, bool] = {}
    for one in graph.get_operations():
        if one.type in _SHAPES:
            found[one.name] = not all(t.shape.is_fully_defined() for t in one.inputs)
        elif one.type == "Const":
            found[one.name] = False
        elif one.inputs and not one.control_inputs and _is_pure(one):
            sources = [t.op.name for t in one.inputs]
            if all(name in found for name in sources):
                found[one.name] = any(found[name] for name in sources)
    return found


def _is_pure(one: tf.Operation) -> bool:
    calls = any(value.HasField("func") for value in one.node_def.attr.values())
    return not one.op_def.is_stateful and not calls


def _frontier(concrete: Any, of_sizes: Mapping[str, bool], example: InferredShapes) -> list[Any]:
    """Tensors made of sizes that are used by what is made of more."""
    found: dict[str, Any] = {}
    for one in concrete.graph.get_operations():
        if one.name in of_sizes:
            continue
        for tensor in one.inputs:
            if of_sizes.get(tensor.op.name) and _is_taken(tensor, example):
                found[tensor.name] = tensor
    return list(found.values())


def _is_taken(tensor: Any, example: InferredShapes) -> bool:
    if tensor.dtype not in _INTEGERS:
        return True
    at = example.shape(tensor)
    return bool(not tensor.shape.is_fully_defined() and at.is_fully_defined())


def _made(tensor: Any, graphs: Sequence[InferredShapes], definition: Any) -> SizeTensor:
    """What makes a tensor of shapes."""
    needed: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    waiting = [tensor]
    while waiting:
        one = waiting.pop().op
        if one.type in _SHAPES:
            leaves[one.name] = one
        elif one.name not in needed:
            needed[one.name] = one
            waiting.extend(one.inputs)
    nodes = {node.name: node for node in definition.node}
    part = graph_pb2.GraphDef(versions=definition.versions, node=[nodes[name] for name in needed])
    sources = {t.name: t for leaf in leaves.values() for t in leaf.inputs}

    def make(*shapes: Any) -> Any:
        known = dict(zip(sources, shapes, strict=True))
        values = {
            out.name: _shape_result(leaf, out, known[t.name])
            for leaf in leaves.values()
            for t, out in zip(leaf.inputs, leaf.outputs, strict=True)
        }
        if tensor.name in values:
            return tf.identity(values[tensor.name])
        return imported(part, list(values), list(values.values()), [tensor])[0]

    specs = [tf.TensorSpec([t.shape.rank], tf.int32) for t in sources.values()]
    return SizeTensor(
        tf.function(make, autograph=False).get_concrete_function(*specs),
        tuple(_examples(t, graphs) for t in sources.values()),
        tf.TensorSpec(tensor.shape, tensor.dtype),
        _examples(tensor, graphs),
    )


def _shape_result(leaf: tf.Operation, output: Any, shape: Any) -> Any:
    """What an operation that looks at a shape gives."""
    value = tf.reduce_prod(shape) if leaf.type == "Size" else shape
    return tf.cast(value, output.dtype)


def _examples(tensor: Any, graphs: Sequence[InferredShapes]) -> Shapes:
    """A tensor's shape in each example."""
    shapes = [one.shape(tensor) for one in graphs]
    if not all(shape.is_fully_defined() for shape in shapes):
        raise CannotLift(f"the shape of {tensor.name}, which does not follow from the inputs'")
    return tuple(tuple(shape) for shape in shapes)
