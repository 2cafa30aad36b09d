"""Which nodes of programs for several sizes stand for the same operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.lowered_program import LoweredProgram
from kdist.dtensor.sizes import CannotLift
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import node_of

from tensorflow.core.framework import tensor_shape_pb2


@dataclasses.dataclass
class Twins:
    """The nodes that results and effects need, in programs of one function for several sizes.

    Attributes:
        nodes: By name in the first program, those that stand for one operation, one a program.
        copies: Constants that are one in the first program and several in others, since they happen
            to be equal there: which input of which node is to be a copy of what name.
        gathers: Where the parts of gathers begin in the first; see `LoweredProgram`.
    """

    nodes: dict[str, list[Any]]
    copies: dict[tuple[str, int], str]
    gathers: Mapping[str, list[tuple[int, ...]]]


def twins(programs: Sequence[LoweredProgram]) -> Twins:
    """Finds the nodes that stand for one operation.

    Args:
        programs: Of one function, for several sizes.

    Raises:
        CannotLift: The programs differ in more than sizes.
    """
    stitchers = [Stitcher(one, rewired=False) for one in programs]
    found = Twins({}, {}, stitchers[0].begins)
    constants: dict[tuple[str, ...], str] = {}
    waiting = [("", 0, one) for one in zip(*(one.results for one in programs), strict=True)]
    waiting += [("", 0, one) for one in zip(*(one.effects for one in stitchers), strict=True)]
    while waiting:
        user, place, references = waiting.pop()
        name = node_of(references[0])
        nodes = [s.nodes.get(node_of(r)) for s, r in zip(stitchers, references, strict=True)]
        if nodes[0] is None:
            _compare_inputs(stitchers, references)
            continue
        names = tuple(node.name if node is not None else "" for node in nodes)
        if user and all(node is not None and node.op == "Const" for node in nodes):
            own = name if name not in found.nodes else f"{name}_{len(constants)}_copy"
            name = constants.setdefault(names, own)
            if name != names[0]:
                found.copies[user, place] = name
        if name not in found.nodes:
            found.nodes[name] = nodes
            waiting += _sources(stitchers, nodes)
        elif names != tuple(node.name for node in found.nodes[name]):
            raise CannotLift(f"{name} ({nodes[0].op}) is another operation at other sizes")
    _compare_bodies(programs)
    return found


def _compare_inputs(stitchers: Sequence[Stitcher], references: Sequence[str]) -> None:
    positions = [s.inputs.get(node_of(r)) for s, r in zip(stitchers, references, strict=True)]
    if len(set(positions)) > 1:
        raise CannotLift("another input is used at other sizes")


def _sources(
    stitchers: Sequence[Stitcher], nodes: Sequence[Any]
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """What goes into nodes that should be one operation: into which, as which input."""
    first = nodes[0]
    if any(node is None or node.op != first.op for node in nodes):
        raise CannotLift(f"{first.name} ({first.op}) is another operation at other sizes")
    if first.op in COLLECTIVES:
        yield "", 0, tuple(s.source(node) for s, node in zip(stitchers, nodes, strict=True))
        return
    if len({len(node.input) for node in nodes}) > 1:
        raise CannotLift(f"{first.name} ({first.op}) has other inputs at other sizes")
    for place, references in enumerate(zip(*(node.input for node in nodes), strict=True)):
        yield first.name, place, references


def _compare_bodies(programs: Sequence[LoweredProgram]) -> None:
    """Loops and branches must be the same at all sizes: nothing in them is looked at.

    Raises:
        CannotLift: They are not.
    """
    bodies = [
        [_plain_nodes(definition) for _, definition in sorted(one.bodies.items())]
        for one in programs
    ]
    if any(one != bodies[0] for one in bodies):
        raise CannotLift("a loop or branch that computes with sizes")


def _plain_nodes(definition: Any) -> list[Any]:
    nodes = []
    for node in definition.node_def:
        attributes = {k: v.SerializeToString() for k, v in node.attr.items() if k[0] != "_"}
        nodes.append((node.op, list(node.input), sorted(attributes.items())))
    return nodes


def relax(node: Any, nodes: Sequence[Any]) -> None:
    """Makes sizes in attributes unknown, where they differ.

    Args:
        node: The node to change.
        nodes: Those of all programs that stand for it.

    Raises:
        CannotLift: They differ in other attributes than shapes and values.
    """
    for key, value in node.attr.items():
        others = [one.attr[key] for one in nodes]
        if all(one == value for one in others) or (node.op, key) == ("Const", "value"):
            continue
        if value.HasField("shape"):
            _relax_shape(value.shape, [one.shape for one in others])
        elif value.list.shape:
            for i, shape in enumerate(value.list.shape):
                _relax_shape(shape, [one.list.shape[i] for one in others])
        elif not key.startswith("_") and node.op not in COLLECTIVES:
            raise CannotLift(f"{key} of {node.name} ({node.op}) depends on sizes")


def _relax_shape(shape: Any, others: Sequence[tensor_shape_pb2.TensorShapeProto]) -> None:
    if any(len(one.dim) != len(shape.dim) for one in others):
        shape.Clear()
        shape.unknown_rank = True
    for i, dim in enumerate(shape.dim):
        if any(one.dim[i].size != dim.size for one in others):
            dim.size = -1


def sizes_of(nodes: Sequence[Any]) -> list[tuple[int, ...]]:
    """Of the only result of nodes that stand for one: each dim in each program."""
    noted = [node.attr[SHAPES].list.shape for node in nodes]
    if any(len(one) != 1 or len(one[0].dim) != len(noted[0][0].dim) for one in noted):
        return []
    return [*zip(*([dim.size for dim in one[0].dim] for one in noted), strict=True)]
