"""Islands: operations of a traced function that DTensor does not see.

An operation that DTensor cannot expand is taken out of the traced function before it is lowered.
What it reads becomes further results of the function, whole on every device (that is the gather,
made of DTensor's own collectives), and what it makes becomes further inputs, whole too. Then its
nodes, as they were traced, are put between the two in the program that DTensor made, so that every
device runs them on whole operands: a transfer would cost more than the devices' time, which they
have anyway. Only what has an effect (Python, print) runs once, on the first device. The autodiff is
done when a function is cut, so operations of the backward pass are islands like any other. All
other operations stay cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import dtensor_internals
from kdist.dtensor import flops
from kdist.dtensor.body import Body, control_inputs, data_inputs
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.limits import LAYOUTS
from kdist.dtensor.lowered_program import Argument, Function, Island, LoweredProgram
from kdist.graphs.chunks import node_of
from kdist.graphs.layer_names import layer_of

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.experimental import dtensor

SCOPE = "island/"
"""Of the nodes of islands in a program, and of their functions' names."""
HANDLE = "kdist_handle_"
"""Begins the names of a program's parameters that islands alone read, as DTensor has no such."""
_STAYS = (tf.variant, tf.resource, tf.string)
"""Dtypes that no DTensor has."""
_JOIN = ("Transpose",)
"""What joins an island that it is next to: DTensor does not transpose where a layout changes."""
_PASSES = ("Identity", "Reshape", "Transpose", "Cast")
"""What may stand between a gather and the tensor that is gathered."""


class CannotCut(Exception):
    """An island has no border that a DTensor can cross; carries why."""


def crosses(spec: Any) -> bool:
    """Whether a tensor, or one of a spec, may go into an island, and come out of it."""
    return is_handed_on(spec) and spec.shape.is_fully_defined()


def is_handed_on(spec: Any) -> bool:
    """Whether a tensor may go from one function to another: not a list of tensors, for example."""
    return spec.dtype not in _STAYS


def with_neighbours(body: Body, chosen: Mapping[str, str]) -> dict[str, str]:
    """Operations, with those that cannot be parted from them.

    Lists of tensors, strings and tensors of unknown size are read where they are made; what has an
    effect keeps its order; a transposition costs nothing more on what is gathered anyway.

    Args:
        body: The traced function.
        chosen: Reasons by name of node.

    Returns:
        Reasons by name; "" for those that are there for another one's sake.

    Raises:
        CannotCut: A list of tensors, for example, is an input or a result of the function.
    """
    readers, found = body.readers(), dict(chosen)
    effects = _ordered_effects(body)
    made, waiting = body.made, list(chosen)
    while waiting:
        name = waiting.pop()
        inside = [r for r in made.get(name, ()) if not crosses(body.specs[r])]
        joined = [reader for reference in inside for reader in readers.get(reference, ())]
        _refuse(body, inside, body.results)
        given = [r for r in data_inputs(body.nodes[name]) if not crosses(body.specs[r])]
        given = [r for r in given if r not in body.handles]
        _refuse(body, given, body.inputs)
        joined += [one for one in map(node_of, given) if body.nodes[one].op != "Const"]
        joined += effects.get(name, ())
        beside = [r for reference in made.get(name, ()) for r in readers.get(reference, ())]
        beside += map(node_of, data_inputs(body.nodes[name]))
        joined += [one for one in beside if one in body.nodes and body.nodes[one].op in _JOIN]
        for one in joined:
            if one not in found:
                found[one] = ""
                waiting.append(one)
    return found


def _refuse(body: Body, references: Sequence[str], border: Sequence[str]) -> None:
    for reference in references:
        if reference in border:
            spec = body.specs[reference]
            what = "a list of tensors" if spec.dtype == tf.variant else f"a {spec.dtype.name}"
            raise CannotCut(f"{what} of shape {spec.shape} that leaves its function")


def _ordered_effects(body: Body) -> dict[str, list[str]]:
    """By name of a node with effects, those that it waits for, and that wait for it."""
    effects = {name for name, node in body.nodes.items() if body.has_effects(node)}
    found: dict[str, list[str]] = {name: [] for name in effects}
    for name in effects:
        waiting = [node_of(one) for one in control_inputs(body.nodes[name])]
        while waiting:
            other = waiting.pop()
            if other in effects:
                found[name].append(other)
                found[other].append(name)
            elif other in body.nodes:
                waiting += [node_of(one) for one in control_inputs(body.nodes[other])]
    return found


class WithoutIslands:
    """A traced function without some of its operations, to lower, and to put them back.

    Args:
        body: The traced function.
        chosen: Why an operation is taken out, by name of its node; see `with_neighbours`.
        mesh: The DTensor mesh to lower for.
        tagged: See `Body.definition`.
    """

    def __init__(
        self,
        body: Body,
        chosen: Mapping[str, str],
        mesh: dtensor.Mesh,
        tagged: Mapping[str, int] | None = None,
    ) -> None:
        self.body, self.mesh = body, mesh
        self.inside = {name: chosen[name] for name in body.nodes if name in chosen}
        read: dict[str, None] = {}
        made: dict[str, None] = {}
        for name, node in body.nodes.items():
            for reference in data_inputs(node):
                other = node_of(reference)
                if name in self.inside and other not in self.inside:
                    if body.constant(reference) is None and reference not in body.handles:
                        read[reference] = None
                elif name not in self.inside and other in self.inside:
                    made[reference] = None
        made.update({r: None for r in body.results if node_of(r) in self.inside})
        self.read, self.made = list(read), list(made)
        self.taken = [one for one in body.inputs if one not in body.handles]
        self._positions = [p for p, r in enumerate(body.inputs) if r not in body.handles]
        specs = {reference: body.specs[reference] for reference in [*self.taken, *self.made]}
        results = [*body.results, *self.read]
        definition = body.definition(specs, results, self.inside, tagged)
        self._registered = dtensor_internals.Registered(definition, body.concrete)
        self.function = Function(list(specs.values()), self._call)
        self._whole = [dtensor.Layout.replicated(mesh, body.specs[r].shape.rank) for r in made]

    def layouts(self, layouts: Sequence[dtensor.Layout]) -> list[dtensor.Layout]:
        """Of what `function` takes, from those of what the traced function does."""
        return [*(layouts[p] for p in self._positions), *self._whole]

    def _call(self, given: Sequence[Any]) -> Any:
        references = [*self.body.results, *self.read]
        specs = [self.body.specs[one] for one in references]
        _, flat = self._registered.call(given, [one.dtype for one in specs])
        for tensor, spec in zip(flat, specs, strict=True):
            tensor.set_shape(spec.shape)
        count = len(self.body.results)
        results = iter(flat[:count])
        structure = tf.nest.map_structure(
            lambda t: None if t is None else next(results), self.body.concrete.structured_outputs
        )
        return structure, [
            dtensor.relayout(tensor, dtensor.Layout.replicated(self.mesh, tensor.shape.rank))
            for tensor in flat[count:]
        ]

    def joined(self, program: LoweredProgram, layers: Sequence[str]) -> LoweredProgram:
        """The program that DTensor made of `function`, with the operations back in it.

        Args:
            program: The program.
            layers: Paths of the model's layers, to say where an island is.
        """
        count, given = len(self.body.results), len(self.taken)
        whole = dict(zip(self.read, program.results[count:], strict=True))
        back: dict[str, str] = {}
        arguments = []
        for one in program.arguments:
            if one.position is None:
                arguments.append(one)
            elif one.position < given:
                arguments.append(dataclasses.replace(one, position=self._positions[one.position]))
            else:
                back[one.name] = SCOPE + self.made[one.position - given]
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(program.definition)
        kept = [one for one in definition.signature.input_arg if one.name not in back]
        del definition.signature.input_arg[:]
        definition.signature.input_arg.extend(kept)
        for reference in self._handles():
            whole[reference] = name = f"{HANDLE}{self.body.inputs.index(reference)}"
            definition.signature.input_arg.add(name=name, type=tf.resource.as_datatype_enum)
            arguments.append(Argument(name, self.body.inputs.index(reference)))
        for node in definition.node_def:
            read = [back.get(one, one) for one in node.input]
            if node.op in COLLECTIVES:  # their order is DTensor's, which knows of no islands
                read = [one for one in read if not one.startswith("^")]
            node.input[:] = read
        nodes = [self._node(name, whole) for name in [*self.inside, *self._constants()]]
        definition.node_def.extend(nodes)
        functions = [f for name in self.inside for f in self.body.called(self.body.nodes[name])]
        bodies = {SCOPE + f.signature.name: self._function(f) for f in functions}
        groups = self._groups()
        return dataclasses.replace(
            program,
            definition=definition,
            bodies={**program.bodies, **bodies},
            arguments=tuple(arguments),
            results=program.results[:count],
            layouts=program.layouts[:count],
            structure=program.structure[0],
            untouched=frozenset({*bodies, *(node.name for node in nodes)}),
            once=frozenset(SCOPE + name for group in groups for name in self._once(group)),
            islands=tuple(self._islands(groups, program, layers)),
        )

    def _handles(self) -> list[str]:
        """Of the resources that the traced function takes, those that islands read."""
        read = {r for name in self.inside for r in data_inputs(self.body.nodes[name])}
        return [one for one in self.body.handles if one in read]

    def _constants(self) -> list[str]:
        """Names of the constants that islands read, and have copies of."""
        read = (node_of(r) for n in self.inside for r in data_inputs(self.body.nodes[n]))
        names = dict.fromkeys(one for one in read if one in self.body.nodes)
        return [n for n in names if n not in self.inside and self.body.nodes[n].op == "Const"]

    def _node(self, name: str, whole: Mapping[str, str]) -> Any:
        """A node of an island as it is in the program."""
        node = self._renamed(self.body.nodes[name])
        waits = [one[1:] for one in control_inputs(node) if one[1:] in self.inside]
        node.name = SCOPE + name
        node.input[:] = [whole.get(one, SCOPE + one) for one in data_inputs(node)]
        node.input.extend(f"^{SCOPE}{one}" for one in waits)
        if name in self.body.operations:
            made = self.body.operations[name].outputs
            del node.attr[SHAPES].list.shape[:]
            node.attr[SHAPES].list.shape.extend(t.shape.as_proto() for t in made)
        node.ClearField("experimental_debug_info")
        return node

    def _function(self, function: Any) -> Any:
        made = function_pb2.FunctionDef()
        made.CopyFrom(function)
        made.signature.name = SCOPE + function.signature.name
        del made.node_def[:]
        made.node_def.extend(map(self._renamed, function.node_def))
        return made

    def _renamed(self, node: Any) -> Any:
        """A copy of a node that calls functions by their names in the program."""
        copy = type(node)()
        copy.CopyFrom(node)
        if copy.op in LAYOUTS:  # on one device there is nothing to lay out
            copy.input[:] = [copy.input[0], *control_inputs(node)]
            copy.attr.clear()
            copy.op, copy.attr["T"].type = "Identity", node.attr["T"].type
        for value in copy.attr.values():
            for function in (value.func, *value.list.func):
                if function.name in self.body.functions:
                    function.name = SCOPE + function.name
        return copy

    def _groups(self) -> list[list[str]]:
        """The operations by island: those that read what others of them make."""
        group = {name: [name] for name in self.inside}
        for name in self.inside:
            for other in map(node_of, self.body.nodes[name].input):
                if other in group and group[other] is not group[name]:
                    merged = group[other] + group[name]
                    group.update(dict.fromkeys(merged, merged))
        found = {id(names): names for names in group.values()}
        return list(found.values())

    def _once(self, names: Sequence[str]) -> Sequence[str]:
        """The operations of an island if it has an effect: these run on one device."""
        return names if any(self.body.has_effects(self.body.nodes[n]) for n in names) else ()

    def _islands(
        self, groups: Sequence[Sequence[str]], program: LoweredProgram, layers: Sequence[str]
    ) -> Iterator[Island]:
        total = flops.graph_flops(self.body.concrete.graph)
        known = self.body.operations
        gathered = self._gathered(program)
        order = {name: i for i, name in enumerate(self.inside)}
        for group in groups:
            work = {n: flops.operation_flops(known[n]) if n in known else 0.0 for n in group}
            where = {n: layer_of(n, layers) for n in group}
            names = sorted(group, key=lambda n: self._importance(n, where[n], work[n], order[n]))
            yield Island(
                tuple((self.body.nodes[n].op, n) for n in names),
                "; ".join(dict.fromkeys(self.inside[n] for n in names if self.inside[n])),
                where[names[0]],
                sum(gathered.get(r, 0) for r in self._read_by(names)),
                sum(work.values()),
                sum(work.values()) / total if total else 0.0,
            )

    def _importance(self, name: str, layer: str, work: float, number: int) -> tuple:
        """Sorts an island's operations so that the one that it is about is first."""
        functions = any(True for _ in self.body.called(self.body.nodes[name]))
        return not self.inside[name], not layer, -work, not functions, number

    def _read_by(self, names: Sequence[str]) -> list[str]:
        """What operations read of what is not in an island, each tensor once."""
        read = (r for n in names for r in data_inputs(self.body.nodes[n]))
        return [r for r in dict.fromkeys(read) if r in self.read]

    def _gathered(self, program: LoweredProgram) -> dict[str, int]:
        """Bytes of the operands that are the result of a gather in the program."""
        nodes = {node.name: node for node in program.definition.node_def}
        sizes = {one.node: one.bytes for one in program.collectives if one.kind == "all-gather"}
        found = {}
        for reference, whole in zip(self.read, program.results[len(self.body.results) :]):
            name = node_of(whole)
            while name not in sizes and name in nodes and nodes[name].op in _PASSES:
                name = node_of(nodes[name].input[0])
            found[reference] = sizes.get(name, 0)
        return found
