"""What a traced function makes of texts: computed in front of it, as DTensor has no tables.

Layers that look texts up (`StringLookup`, `TextVectorization`, `Hashing`) have no weights and give
no gradients. So what they make follows from the batch alone, is the same on every device of a
slice, and is made once there.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kdist._compat import said_shapes
from kdist.dtensor.inputs import part_of_batch
from kdist.dtensor.lowered_program import LoweredProgram
from kdist.dtensor.lowering import positions
from kdist.dtensor.sharded import Sharded, replicate
from kdist.graphs.inferred import imported
from kdist.program.pruning import effects_in
from kdist.sharding.mesh import Topology

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.experimental import dtensor

TABLES = (tf.string, tf.resource)
"""Dtypes that no DTensor has, of what is looked up and of where."""
_splits: weakref.WeakKeyDictionary[Any, TextsInFront | None] = weakref.WeakKeyDictionary()


class CannotSplit(Exception):
    """Texts make a tensor whose shape does not follow from the batch's; carries which."""


@dataclasses.dataclass(frozen=True)
class TextsInFront:
    """A traced function in two: what has to do with texts, and the rest.

    Attributes:
        front: Concrete function of the inputs at `read`; its results are inputs of `rest`.
        read: Positions of flat inputs and captures of the function.
        rest: Concrete function of the inputs at `kept`, then the results of `front`. It gives what
            the function gives.
        kept: Positions, alike.
        count: Inputs and captures of the function.
        structure: The function's results, with positions of flat results as leaves.
    """

    front: Any
    read: tuple[int, ...]
    rest: Any
    kept: tuple[int, ...]
    count: int
    structure: Any

    def computed(
        self, given: Sequence[Sharded], mesh: dtensor.Mesh, topology: Topology
    ) -> list[Sharded]:
        """Flat inputs and captures of the function, then what `front` makes of them.

        Where an axis cuts the rows of the texts, it cuts those of what is made of them.
        """
        read = [given[p] for p in self.read]
        cut = {t.shape[0] for t in read if t.layout and not t.layout.is_fully_replicated()}
        made = self.front(*(t.joined() for t in read))
        parts = (
            part_of_batch(t, mesh, topology)
            if t.shape.rank and t.shape[0] in cut
            else replicate(t, mesh)
            for t in made
        )
        return [*given, *parts]

    def taken(self, given: Sequence[Sharded]) -> list[Sharded]:
        """Of these, the inputs of `rest`."""
        return [*(given[p] for p in self.kept), *given[self.count :]]

    def numbered(self, program: LoweredProgram) -> LoweredProgram:
        """A program made of `rest`, as one of what `computed` gives."""
        places = [*self.kept, *range(self.count, self.count + len(self.front.outputs))]
        arguments = (
            one if one.position is None else dataclasses.replace(one, position=places[one.position])
            for one in program.arguments
        )
        return dataclasses.replace(program, arguments=tuple(arguments), structure=self.structure)


def in_front(concrete: Any) -> TextsInFront | None:
    """A traced function in two; None if it has to do with numbers alone.

    Raises:
        CannotSplit: The rest would begin at a tensor of unknown shape.
    """
    if concrete not in _splits:
        texts = _texts(concrete)
        _splits[concrete] = _split(concrete, texts) if texts else None
    return _splits[concrete]


def _texts(concrete: Any) -> list[tf.Operation]:
    """What has to do with texts and is computed in front.

    What a print or a summary says of numbers is not: it stays where the numbers are made.
    """
    values = _values(concrete)
    found = {name: one for name, one in values.items() if _is_of_texts(one)}
    texts = {t.op.name for t in concrete.inputs if t.dtype == tf.string}
    live = {one.name for one in _live(concrete)}
    for one in [one for one in concrete.graph.get_operations() if one.name in live]:
        if one.name in found:
            texts.add(one.name)
        elif any(t.dtype == tf.string and t.op.name in texts for t in one.inputs):
            found[one.name] = one
            texts.add(one.name)
    return list(found.values())


def _values(concrete: Any) -> dict[str, tf.Operation]:
    """The operations whose values decide the results of a function."""
    return _ancestors([t.op for t in concrete.outputs], (), ())


def _is_of_texts(one: tf.Operation) -> bool:
    """Whether an operation reads or makes a text, or looks something up; not what a check says."""
    read = [t for t in one.inputs if t.op.type != "Const"]
    return bool(one.inputs) and any(t.dtype in TABLES for t in (*read, *one.outputs))


def _split(concrete: Any, texts: Sequence[tf.Operation]) -> TextsInFront:
    inputs = {t.op.name: n for n, t in enumerate(concrete.inputs)}
    # Not what prints wait for: other prints.
    values = _values(concrete)
    needed = _ancestors(texts, inputs, values)
    border = _border(concrete, needed)
    mine = _weights(concrete, _ancestors(texts, (), values))
    while unknown := [t for t in border if not t.shape.is_fully_defined()]:
        # Words of a text, say: what is made of them, until there are as many as there are rows.
        readers = [one for t in unknown for one in t.consumers()]
        if not readers or _weights(concrete, _ancestors(readers, ())) - mine:
            raise CannotSplit(
                f"{unknown[0].op.name}, made of texts whose values decide its shape. Give "
                "TextVectorization an output_sequence_length, or look texts up in the dataset"
            )
        needed = _ancestors([*needed.values(), *readers], inputs, values)
        border = _border(concrete, needed)
    constants = [t for t in border if tf.get_static_value(t) is not None]
    made = [t for t in border if tf.get_static_value(t) is None]
    read = sorted({inputs[n] for one in needed.values() for n in _reads(one) if n in inputs})
    others = [one for one in _live(concrete) if one.name not in needed]
    later = {one.name for one in others} - inputs.keys()
    handles = {t.name for one in others for t in one.inputs if t.dtype == tf.resource}
    kept = [n for n, t in enumerate(concrete.inputs) if t.dtype not in TABLES or t.name in handles]
    front = _function(concrete, read, [], needed, made)
    rest = _function(concrete, kept, made, later, concrete.outputs, constants)
    structure = positions(concrete.structured_outputs)
    return TextsInFront(front, tuple(read), rest, tuple(kept), len(inputs), structure)


def _live(concrete: Any) -> list[tf.Operation]:
    """Operations of which the results of a function are made, and the inputs among these.

    So is what has an effect: no result need wait for it.
    """
    results = [t.op for t in concrete.outputs]
    return list(_ancestors([*results, *effects_in(concrete.graph)], ()).values())


def _ancestors(
    operations: Iterable[tf.Operation],
    inputs: Collection[str],
    waiting_ones: Collection[str] | None = None,
) -> dict[str, tf.Operation]:
    """These operations and all that they depend on, by name; without the function's inputs.

    Args:
        operations: The operations.
        inputs: Names of the function's inputs.
        waiting_ones: Names of those for which what they wait for counts, though they read nothing
            of it; all by default.
    """
    found: dict[str, tf.Operation] = {}
    waiting = list(operations)
    while waiting:
        one = waiting.pop()
        if one.name not in found and one.name not in inputs:
            found[one.name] = one
            waiting += [t.op for t in one.inputs]
            if waiting_ones is None or one.name in waiting_ones:
                waiting += one.control_inputs
    return found


def _reads(one: tf.Operation) -> list[str]:
    return [t.op.name for t in one.inputs]


def _weights(concrete: Any, names: Collection[str]) -> set[str]:
    """Of some operations, those that may be weights which the function is given."""
    captured = len(concrete.captured_inputs)
    given = concrete.inputs[: len(concrete.inputs) - captured]
    return {t.op.name for t in given if t.dtype.is_floating and t.op.name in names}


def _border(concrete: Any, needed: Mapping[str, tf.Operation]) -> list[Any]:
    """What some operations make for others."""
    others = [one for one in _live(concrete) if one.name not in needed]
    wanted = [*(t for one in others for t in one.inputs), *concrete.outputs]
    return list({t.name: t for t in wanted if t.op.name in needed}.values())


def _function(
    concrete: Any,
    positions: Sequence[int],
    more: Sequence[Any],
    names: Collection[str],
    results: Sequence[Any],
    constants: Sequence[Any] = (),
) -> Any:
    """Some operations of a function, as one of inputs at some positions and of more tensors.

    Args:
        concrete: The function.
        positions: Of its inputs.
        more: Tensors in it.
        names: Of the operations.
        results: Tensors in it, which the new one returns.
        constants: Tensors whose values are known, and are written into it.
    """
    given = [*(concrete.inputs[p] for p in positions), *more]
    definition = _definition(concrete.graph, names)
    read = {_tensor(one) for node in definition.node for one in node.input}

    def call(*flat: Any) -> list[Any]:
        values = dict(zip([t.name for t in given], flat, strict=True))
        values |= {t.name: tf.constant(tf.get_static_value(t), t.dtype) for t in constants}
        wanted = [t for t in results if t.name not in values]
        taken = {name: value for name, value in values.items() if name in read}
        found = imported(definition, list(taken), list(taken.values()), wanted)
        # Of a look-up Python knows the shape, but not the definition.
        known = [tf.ensure_shape(one, t.shape) for one, t in zip(found, wanted, strict=True)]
        values |= dict(zip([t.name for t in wanted], known, strict=True))
        return [values[t.name] for t in results]

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in given]
    return tf.function(call, autograph=False).get_concrete_function(*specs)


def _definition(graph: tf.Graph, names: Collection[str]) -> Any:
    """The definition of some operations of a graph, which wait for each other alone."""
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in names]
    del definition.node[:]
    for node in nodes:
        waits = [one for one in node.input if one.startswith("^") and one[1:] not in names]
        node.input[:] = [one for one in node.input if one not in waits]
        node.attr.pop("_class", None)  # beside which other operation it is
    definition.node.extend(nodes)
    _keep_said_shapes(definition, graph)
    return definition


def _keep_said_shapes(definition: Any, graph: tf.Graph) -> None:
    """Has operations check the shapes that `set_shape` alone knows."""
    names = {node.name for node in definition.node}
    instead = {}
    for name, index in said_shapes.noted(graph):
        if name in names:
            tensor = graph.get_operation_by_name(name).outputs[index]
            instead[tensor.name] = node = node_def_pb2.NodeDef(
                name=f"{name}_{index}_as_said", op="EnsureShape", input=[tensor.name]
            )
            node.attr["T"].type = tensor.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    for node in definition.node:
        for i, reference in enumerate(node.input):
            if not reference.startswith("^") and _tensor(reference) in instead:
                node.input[i] = instead[_tensor(reference)].name
    definition.node.extend(instead.values())


def _tensor(reference: str) -> str:
    """The name of a tensor that a node reads."""
    return reference if ":" in reference else f"{reference}:0"
