"""Reduce-scatters: sums of which each device needs its own part alone.

DTensor adds up a product of cut matrices on all devices, and cuts the result afterwards if its
layout says so: an all-reduce, and a slice on each device. Each part is added up where it is needed
instead, which sends half of what an all-reduce does. Sequence parallelism lives on it (Korthikanti
et al. 2022, arXiv:2205.05198). Sums of such sums, such as the gradient of what query, key and value
are all made of, are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.partial_sums import is_sum
from kdist.dtensor.rewiring import Rewiring
from kdist.graphs.chunks import node_of

import numpy as np
from tensorflow.core.framework import node_def_pb2

_SCATTER = "CollectiveReduceScatterV2"
_PASSED = frozenset({"Identity", "Reshape"})
_KEEP_SHAPE = frozenset({"Identity", "BiasAdd"})
_JOINS = frozenset({"Add", "AddV2", "AddN"})


def scatter(rewiring: Rewiring) -> None:
    """Makes reduce-scatters of sums of which devices need parts, and one of sums of them.

    Args:
        rewiring: Of the program. What stitches it learns along which dim each of them cuts.
    """
    live = rewiring.program.live
    for name in live:
        _scatter(rewiring, rewiring.nodes[name])
    for name in live:
        if rewiring.nodes[name].op in _JOINS:
            _join(rewiring, name)


def _scatter(rewiring: Rewiring, node: Any) -> None:
    """Puts a reduce-scatter in the place of an all-reduce and the slice of its result."""
    program = rewiring.program
    if node.op not in COLLECTIVES or not is_sum(node) or node.name in program.begins:
        return
    between, last = rewiring.passed(rewiring.only_user(node.name), _PASSED)
    biases, last = rewiring.passed(last, _KEEP_SHAPE)
    if last is None or last.op != "Slice":
        return
    dim = _dim(rewiring, last, program.groups(node))
    if dim is None or (biases and dim == program.shape(rewiring.now(last.input[0])).rank - 1):
        return
    source = program.source(node)
    if between:  # summands are reshaped as their sum was
        rewiring.own(between[0].name).input[0] = source
        source = f"{between[-1].name}:output:0"
    rewiring.collective(node, last, _SCATTER, source, "output")
    program.cut_dims[last.name] = dim
    if biases:
        _add_after(rewiring, last.name, biases)


def _add_after(rewiring: Rewiring, scattered: str, biases: Sequence[Any]) -> None:
    """Adds a bias to the parts of a sum, and not to the whole."""
    part, users = rewiring.nodes[scattered], rewiring.users
    for one in biases:
        if SHAPES in part.attr:
            rewiring.own(one.name).attr[SHAPES].CopyFrom(part.attr[SHAPES])
    first, last = biases[0].name, biases[-1].name
    rewiring.own(first).input[0] = f"{scattered}:data:0"
    rewiring.rename(f"{scattered}:output:0", f"{last}:output:0")
    users[last], users[scattered] = users[scattered], [first]


def _dim(rewiring: Rewiring, part: Any, groups: Sequence[Sequence[int]]) -> int | None:
    """Along which dim a slice takes the parts of a group's members, one after the other.

    None if it takes others: DTensor cuts equally, in the order of the axis.
    """
    program = rewiring.program
    begins = program.values.get(node_of(part.input[1]))
    if begins is None:
        return None
    table = np.array([np.ravel(begin) for begin in begins])
    cut = np.flatnonzero(table.any(0))
    size, whole = program.shape(f"{part.name}:output:0"), program.shape(rewiring.now(part.input[0]))
    if len(cut) != 1 or size.rank is None or whole.rank is None:
        return None
    dim = int(cut[0])
    count, width = len(groups[0]), size[dim]
    if width is None or whole[dim] != count * width:
        return None
    wanted = width * np.arange(count)
    right = all(np.array_equal(table[list(members), dim], wanted) for members in groups)
    return dim if right else None


def _join(rewiring: Rewiring, name: str) -> None:
    """Adds summands up before they are scattered, where the sums would be added afterwards."""
    program, join = rewiring.program, rewiring.nodes[name]
    alike: dict[Any, list[str]] = {}
    for reference in join.input:
        other = node_of(rewiring.now(reference))
        if other in program.cut_dims and len(rewiring.users[other]) == 1:
            groups = tuple(map(tuple, program.groups(rewiring.nodes[other])))
            shape = str(program.shape(f"{other}:data:0"))
            alike.setdefault((groups, program.cut_dims[other], shape), []).append(other)
    for first, *others in alike.values():
        if others and (join.op == "AddN" or _is_equal(rewiring, name, first)):
            _merge(rewiring, name, [first, *others])


def _is_equal(rewiring: Rewiring, name: str, other: str) -> bool:
    """Whether an addition does not broadcast: its result has the shape of an operand."""
    shapes = [rewiring.program.shape(one) for one in (f"{other}:data:0", f"{name}:z:0")]
    return shapes[0].is_fully_defined() and shapes[0].as_list() == shapes[1].as_list()


def _merge(rewiring: Rewiring, name: str, scattered: Sequence[str]) -> None:
    """One reduce-scatter of the sum of what several scatter."""
    program, (first, *others) = rewiring.program, scattered
    sources = [program.sources[one] for one in scattered]
    total = node_def_pb2.NodeDef(name=f"{name}/summands/{first}", op="AddN", input=sources)
    total.attr["N"].i = len(sources)
    total.attr["T"].CopyFrom(rewiring.nodes[first].attr["T"])
    total.attr[SHAPES].list.shape.append(program.shape(sources[0]).as_proto())
    rewiring.nodes[total.name] = total
    program.sources[first] = rewiring.own(first).input[0] = f"{total.name}:sum:0"
    join = rewiring.own(name)
    join.input[:] = [r for r in join.input if node_of(rewiring.now(r)) not in others]
    if join.op == "AddN":
        join.attr["N"].i = len(join.input)
    if len(join.input) == 1:
        result = "sum" if join.op == "AddN" else "z"
        rewiring.rename(f"{name}:{result}:0", f"{first}:data:0")
        rewiring.users[first] = rewiring.users[name]
    rewiring.gone(others)
    for one in others:
        del program.cut_dims[one]
