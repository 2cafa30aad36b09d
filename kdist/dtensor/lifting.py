"""One program for all sizes, from programs for a few.

DTensor expands a function for known sizes. Programs of one function for different sizes have the
same operations; what differs are constants: shapes to reshape to, limits of slices, counts. Each
such number is the size of a tensor of the program, or follows from sizes by a product and a sum, in
every example. The lifted program computes these numbers where it runs.

What the function makes of sizes alone (positions, causal masks) is not part of the programs
(`kdist.dtensor.hoisting`); here it becomes one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from kdist._compat import dtensor_internals
from kdist.dtensor import formulas
from kdist.dtensor.body import topological
from kdist.dtensor.collectives import add_constant
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.formulas import Formula, Numbers
from kdist.dtensor.hoisting import Hoisted, SizeTensor
from kdist.dtensor.lowered_program import Argument, LoweredProgram
from kdist.dtensor.sizes import CannotLift, Examples
from kdist.dtensor.twins import Twins, relax, sizes_of, twins
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.experimental import dtensor

_INT32 = tf.int32.as_datatype_enum


def lift(
    programs: Sequence[LoweredProgram], hoisted: Hoisted, layouts: Sequence[dtensor.Layout]
) -> LoweredProgram:
    """Makes one program of those of a function for several sizes.

    Args:
        programs: One for each example.
        hoisted: The function.
        layouts: Of its inputs.

    Returns:
        A program of unknown dims, for the inputs of the function before tensors were taken out.

    Raises:
        CannotLift: The programs differ in more than sizes, or a number does not follow from sizes.
    """
    count = len(hoisted.concrete.inputs) - len(hoisted.made)
    programs = [
        _with_all_inputs(one, hoisted, shapes[:count], layouts)
        for one, shapes in zip(programs, hoisted.shapes, strict=True)
    ]
    first = programs[0]
    found = twins(programs)
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(first.definition)
    nodes = _with_copies(definition, found)
    given = {one.name for one in first.arguments if (one.position or 0) < count}
    writer = _Writer(definition, _Sizes(programs, nodes, found, given))
    for name, alike in found.nodes.items():
        relax(nodes[name], alike)
        if alike[0].op == "Const":
            _lift_constant(writer, nodes[name], alike)
    bodies, taken = dict(first.bodies), {}
    for one in first.arguments:
        if one.name not in given:
            assert one.position is not None
            made = hoisted.made[one.position - count]
            body = made.function.function_def
            bodies[body.signature.name] = body
            taken[one.name] = writer.call(made, body.signature.name, one.name)
    _replace_parameters(definition, taken)
    return dataclasses.replace(
        first,
        definition=definition,
        bodies=bodies,
        arguments=tuple(one for one in first.arguments if one.name in given),
        structure=hoisted.structure,
        gathers=found.gathers,
        examples=tuple(_results(programs, hoisted)),
        bounded=hoisted.bounded,
    )


def _with_all_inputs(
    program: LoweredProgram,
    hoisted: Hoisted,
    shapes: Sequence[Any],
    layouts: Sequence[dtensor.Layout],
) -> LoweredProgram:
    """A program that also takes the inputs of unknown sizes which DTensor left out.

    Of ids whose rows were looked up before, for example, nothing but the sizes is read, and in a
    program for known sizes not even these.
    """
    taken = {one.position for one in program.arguments}
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(program.definition)
    added = []
    for position, shape in enumerate(shapes):
        tensor = hoisted.concrete.inputs[position]
        if position in taken or tensor.shape.is_fully_defined():
            continue
        added.append(Argument(f"kdist_sizes_of_{position}", position, layouts[position]))
        place = len(definition.signature.input_arg)
        definition.signature.input_arg.add(name=added[-1].name, type=tensor.dtype.as_datatype_enum)
        local = tf.TensorShape(layouts[position].local_shape_from_global_shape(list(shape)))
        definition.arg_attr[place].attr[SHAPES].list.shape.add().CopyFrom(local.as_proto())
    return dataclasses.replace(
        program, definition=definition, arguments=(*program.arguments, *added)
    )


def _with_copies(definition: Any, found: Twins) -> dict[str, Any]:
    """Adds the copies of constants to a function; returns its nodes by name."""
    nodes = {node.name: node for node in definition.node_def}
    for (user, place), name in found.copies.items():
        reference = nodes[user].input[place]
        original = nodes[node_of(reference)]
        if name not in nodes:
            nodes[name] = definition.node_def.add()
            nodes[name].CopyFrom(original)
            nodes[name].name = name
        nodes[user].input[place] = reference.replace(original.name, name)
    return nodes


def _lift_constant(writer: _Writer, node: Any, alike: Sequence[Any]) -> None:
    """Has a constant that is not the same at all sizes computed."""
    values = [tf.make_ndarray(one.attr["value"].tensor) for one in alike]
    if all(np.array_equal(one, values[0]) for one in values):
        return
    dtype = node.attr["dtype"].type
    if len({one.shape for one in values}) > 1:
        value = _filled(writer, node, values)
    elif values[0].dtype.kind in "iuf":
        value = _numbers(writer, node, values)
    else:
        raise CannotLift(f"a constant that depends on sizes ({node.name})")
    del node.attr["value"], node.attr["dtype"]
    node.op = "Identity"
    node.attr["T"].type = dtype
    node.input.append(value)


def _filled(writer: _Writer, node: Any, values: Sequence[np.ndarray]) -> str:
    """A tensor of one number, in a shape that depends on sizes."""
    number = values[0].ravel()[:1]
    if len({one.ndim for one in values}) > 1 or any((one != number).any() for one in values):
        raise CannotLift(f"a constant that depends on sizes ({node.name})")
    shape = writer.vector([*zip(*(one.shape for one in values), strict=True)], _INT32, node.name)
    inputs = [shape, writer.constant(number[0])]
    return writer.add("Fill", inputs, "output", T=node.attr["dtype"].type, index_type=_INT32)


def _numbers(writer: _Writer, node: Any, values: Sequence[np.ndarray]) -> str:
    """Whole numbers that depend on sizes."""
    numbers = [one.astype(np.int64) for one in values]
    if any((one != whole).any() for one, whole in zip(values, numbers, strict=True)):
        raise CannotLift(f"a number that depends on sizes and is not whole ({node.name})")
    columns = [tuple(map(int, column)) for column in zip(*map(np.ravel, numbers), strict=True)]
    dtype = node.attr["dtype"].type
    value = writer.vector(columns, dtype, node.name)
    if len(values[0].shape) != 1:
        shape = writer.constant(np.array(values[0].shape, np.int32))
        value = writer.add("Reshape", [value, shape], "output", T=dtype, Tshape=_INT32)
    return value


def _replace_parameters(definition: Any, taken: Mapping[str, str]) -> None:
    """Takes parameters out of a function, and has others stand for them."""
    kept = [one for one in definition.signature.input_arg if one.name not in taken]
    del definition.signature.input_arg[:]
    definition.signature.input_arg.extend(kept)
    definition.ClearField("arg_attr")
    for node in definition.node_def:
        for i, reference in enumerate(node.input):
            node.input[i] = taken.get(reference, reference)


def _results(programs: Sequence[LoweredProgram], hoisted: Hoisted) -> Iterator[Examples]:
    """What each flat result is in each example."""
    nodes = [{node.name: node for node in one.definition.node_def} for one in programs]
    for i, layout in enumerate(programs[0].layouts):
        alike = [n[node_of(p.results[i])] for n, p in zip(nodes, programs, strict=True)]
        local = [*zip(*sizes_of(alike), strict=True)] or [()] * len(programs)
        shapes = [tuple(layout.global_shape_from_local_shape(list(one))) for one in local]
        values = [_integers(n, one) for n, one in zip(nodes, alike, strict=True)]
        known = all(value is not None for value in values)
        yield Examples(tuple(shapes), hoisted.probes[i], tuple(values) if known else None)


def _integers(nodes: Mapping[str, Any], node: Any) -> Any:
    """The value of a node that is constant, and of integers; None for others."""
    while node is not None and node.op == "Identity":
        node = nodes.get(node_of(node.input[0]))
    if node is None or node.op != "Const":
        return None
    value = tf.make_ndarray(node.attr["value"].tensor)
    return value if value.dtype.kind == "i" else None


@dataclasses.dataclass(frozen=True)
class _Source:
    """A dim of a tensor of a program.

    Attributes:
        place: Of what makes the tensor, among the nodes in order; -1 for inputs.
        reference: To the tensor.
        dtype: Of the tensor, as an enumeration value.
        dim: Which of its dims.
    """

    place: int
    reference: str
    dtype: int
    dim: int


class _Sizes:
    """The sizes in a program that are not always the same, and where to read them.

    Args:
        programs: For each example.
        nodes: Those of the program that is made.
        found: What they are in the others.
        given: Names of the parameters that it has.
    """

    def __init__(
        self,
        programs: Sequence[LoweredProgram],
        nodes: Mapping[str, Any],
        found: Twins,
        given: Set[str],
    ) -> None:
        # All nodes: a gather's parts come to it through some that the program does not need.
        self.places = self._as_late(nodes, topological(nodes), given)
        self.sources: dict[Numbers, _Source] = {}
        self._found: dict[tuple[Numbers, int], Formula | None] = {}
        definition = programs[0].definition
        for j, one in enumerate(definition.signature.input_arg):
            if one.name in given:
                self._note([p.definition.arg_attr[j] for p in programs], -1, one.name, one.type)
        for name in sorted(found.nodes, key=self.places.__getitem__):
            place = self.places[name]
            reference, dtype = dtensor_internals.only_result(nodes[name])
            if dtype and nodes[name].op != "Const":
                self._note(found.nodes[name], place, reference, dtype)

    def _as_late(
        self, nodes: Mapping[str, Any], order: Sequence[str], given: Set[str]
    ) -> dict[str, int]:
        """Where each node runs, in an order; notes by node where its result is used first.

        What follows from constants alone comes as late as its first use, so that most sizes are
        known to it.
        """
        needs = set(given)
        for name in order:
            if any(node_of(one) in needs for one in nodes[name].input):
                needs.add(name)
        self._uses: dict[str, int] = {}
        places = {}
        for place, name in reversed([*enumerate(order)]):
            places[name] = place if name in needs else self._uses.get(name, len(order))
            for one in map(node_of, nodes[name].input):
                self._uses[one] = min(self._uses.get(one, len(order)), places[name])
        return places

    def _note(self, alike: Sequence[Any], place: int, reference: str, dtype: int) -> None:
        for dim, size in enumerate(sizes_of(alike)):
            if len(set(size)) > 1:
                self.sources.setdefault(size, _Source(place, reference, dtype, dim))

    def formula(self, numbers: Numbers, user: str) -> Formula:
        """How a number follows from sizes that are known before something is used.

        Raises:
            CannotLift: It does not.
        """
        place = self._uses.get(user, len(self.places))
        if (numbers, place) not in self._found:
            known = [size for size, source in self.sources.items() if source.place < place]
            self._found[numbers, place] = formulas.find(numbers, known)
        found = self._found[numbers, place]
        if found is None:
            raise CannotLift(f"numbers {numbers} do not follow from sizes ({user})")
        return found


class _Writer:
    """Adds nodes that compute numbers from sizes.

    Args:
        definition: The function to add to.
        sizes: Those of the program.
    """

    def __init__(self, definition: Any, sizes: _Sizes) -> None:
        self.definition, self.sizes = definition, sizes
        self._names = (f"kdist_size_{i}" for i in itertools.count())
        self._scalars: dict[Any, str] = {}

    def add(self, op: str, inputs: Sequence[str], result: str, **attributes: int) -> str:
        """Adds a node; attributes named N are numbers, others dtypes."""
        node = self.definition.node_def.add(op=op, name=next(self._names))
        node.input.extend(inputs)
        for key, value in attributes.items():
            setattr(node.attr[key], "i" if key == "N" else "type", value)
        return f"{node.name}:{result}:0"

    def constant(self, value: Any) -> str:
        """Adds a constant."""
        return add_constant(self.definition, next(self._names), "", np.asarray(value))

    def vector(self, columns: Sequence[Numbers], dtype: int, user: str) -> str:
        """Adds a vector of numbers that are known before something is used."""
        parts = [self._number(one, user) for one in columns]
        packed = self.add("Pack", parts, "output", N=len(parts), T=_INT32)
        if dtype == _INT32:
            return packed
        return self.add("Cast", [packed], "y", SrcT=_INT32, DstT=dtype)

    def call(self, made: SizeTensor, function: str, user: str) -> str:
        """Adds a call of what makes a tensor of shapes."""
        shapes = [[*zip(*one, strict=True)] for one in made.shapes]
        inputs = [self.vector(one, _INT32, user) for one in shapes]
        reference = self.add("PartitionedCall", inputs, "output")
        node = self.definition.node_def[-1]
        node.attr["Tin"].list.type.extend([_INT32] * len(inputs))
        node.attr["Tout"].list.type.append(made.spec.dtype.as_datatype_enum)
        node.attr["f"].func.name = function
        return reference

    def _number(self, numbers: Numbers, user: str) -> str:
        if len(set(numbers)) == 1:
            key: Any = numbers[0]
            make = lambda: self.constant(np.int32(numbers[0]))  # noqa: E731
        else:
            key = self.sizes.formula(numbers, user)
            make = lambda: self._computed(key)  # noqa: E731
        if key not in self._scalars:
            self._scalars[key] = make()
        return self._scalars[key]

    def _computed(self, formula: Formula) -> str:
        """Adds what a formula says."""
        value, *others = map(self._size, formula.sizes)
        for other in others:
            value = self.add("Mul", [value, other], "z", T=_INT32)
        steps = (("Mul", formula.scale, 1), ("FloorDiv", formula.parts, 1))
        for op, number, neutral in (*steps, ("AddV2", formula.offset, 0)):
            if number != neutral:
                other = self.constant(np.int32(number))
                value = self.add(op, [value, other], "z", T=_INT32)
        return value

    def _size(self, size: Numbers) -> str:
        """Adds what reads a size."""
        source = self.sizes.sources[size]
        shape = self.add("Shape", [source.reference], "output", T=source.dtype, out_type=_INT32)
        inputs = [shape, self.constant(np.int32(source.dim)), self.constant(np.int32(0))]
        types = {"Tparams": _INT32, "Tindices": _INT32, "Taxis": _INT32}
        return self.add("GatherV2", inputs, "output", **types)
