"""Reduce-scatters: sums of which each device needs its own part alone.

DTensor adds up a product of cut matrices on all devices, and cuts the result afterwards if its
layout says so: an all-reduce, and a slice on each device. Each part is added up where it is needed
instead, which sends half of what an all-reduce does. Sequence parallelism lives on it (Korthikanti
et al. 2022, arXiv:2205.05198). Sums of such sums, such as the gradient of what query, key and value
are all made of, are one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.lowered import Collective
from kdist.dtensor.partial_sums import is_sum
from kdist.graphs.chunks import node_of

import numpy as np
from tensorflow.core.framework import node_def_pb2

if TYPE_CHECKING:
    from kdist.dtensor.stitching import Stitcher

SCATTER = "CollectiveReduceScatterV2"
_PASSED = frozenset({"Identity", "Reshape"})
_KEEP_SHAPE = frozenset({"Identity", "BiasAdd"})
_EACH = "IdentityN"
_JOINS = frozenset({"Add", "AddV2", "AddN"})


class ScatteredSums:
    """Changes the nodes of a program so that sums of which devices need parts are scattered.

    Args:
        program: What stitches the program; its nodes are replaced.
        live: Names of the nodes that results and effects need, inputs first.

    Attributes:
        dims: Along which dim a reduce-scatter cuts, by name of its node.
        results: References of the program's results.
        instead: By name of an all-reduce, the reduce-scatter in its place; "" where it is part of
            another.
    """

    def __init__(self, program: Stitcher, live: Sequence[str]) -> None:
        self.program, self.nodes = program, program.nodes
        self.dims: dict[str, int] = {}
        self.instead: dict[str, str] = {}
        # Functions with gradients of their own hand on what they took beside what they made.
        self._renamed: dict[str, str] = {
            f"{name}:output:{i}": reference
            for name in live
            if self.nodes[name].op == _EACH
            for i, reference in enumerate(self.nodes[name].input)
        }
        self._users: dict[str, list[str]] = {}
        for name in live:
            if self.nodes[name].op != _EACH:
                for reference in program.inputs_of(self.nodes[name]):
                    self._users.setdefault(node_of(self._now(reference)), []).append(name)
        for reference in program.program.results:
            self._users.setdefault(node_of(self._now(reference)), []).append("")
        for name in live:
            if self._may_be_scattered(self.nodes[name]):
                self._scatter(self.nodes[name])
        for name in live:
            if self.nodes[name].op in _JOINS:
                self._join(name)
        for name in [*self.nodes] if self.dims else ():
            if any(one in self._renamed for one in self.nodes[name].input):
                self._own(name).input[:] = [*map(self._now, self.nodes[name].input)]
        program.sources |= {k: self._now(v) for k, v in program.sources.items()}
        self.results = tuple(map(self._now, program.program.results))

    def described(self, collectives: Sequence[Collective]) -> tuple[Collective, ...]:
        """The collectives of the program as they are now."""
        found = []
        for one in collectives:
            name = self.instead.get(one.node, one.node)
            if name != one.node:
                one = dataclasses.replace(one, kind="reduce-scatter", node=name)
            if name:
                found.append(one)
        return tuple(found)

    def _may_be_scattered(self, node: Any) -> bool:
        return node.op in COLLECTIVES and is_sum(node) and node.name not in self.program.begins

    def _now(self, reference: str) -> str:
        """What stands for a reference of the program before."""
        while reference in self._renamed:
            reference = self._renamed[reference]
        return reference

    def _only_user(self, name: str) -> Any:
        """The one node that takes what a node gives; None if there are several, or a result."""
        users = self._users.get(name, [])
        node = self.nodes[users[0]] if len(users) == 1 and users[0] else None
        if node is None or node_of(self._now(node.input[0])) != name:
            return None
        return node

    def _scatter(self, node: Any) -> None:
        """Puts a reduce-scatter in the place of an all-reduce and the slice of its result."""
        between, last = self._passed(self._only_user(node.name), _PASSED)
        biases, last = self._passed(last, _KEEP_SHAPE)
        if last is None or last.op != "Slice":
            return
        groups = self.program.groups(node)
        dim = self._dim(last, groups)
        if dim is None or (biases and dim == self.program.shape(last.input[0]).rank - 1):
            return
        source = self.program.source(node)
        if between:  # summands are reshaped as their sum was
            self._own(between[0].name).input[0] = source
            source = f"{between[-1].name}:output:0"
        self._add(node, last, source, groups, dim)
        self.instead[node.name] = last.name
        if biases:
            self._add_after(last.name, biases)

    def _passed(self, node: Any, ops: Collection[str]) -> tuple[list[Any], Any]:
        """Operations of some kinds, one after the other, and what takes what the last one gives."""
        found: list[Any] = []
        while node is not None and node.op in ops and not _by_channel(node):
            found.append(node)
            node = self._only_user(node.name)
        return found, node

    def _add_after(self, scattered: str, biases: Sequence[Any]) -> None:
        """Adds a bias to the parts of a sum, and not to the whole."""
        part = self.nodes[scattered]
        for one in biases:
            if SHAPES in part.attr:
                self._own(one.name).attr[SHAPES].CopyFrom(part.attr[SHAPES])
        self._own(biases[0].name).input[0] = f"{scattered}:data:0"
        self._renamed[f"{scattered}:output:0"] = f"{biases[-1].name}:output:0"
        self._users[biases[-1].name] = self._users[scattered]
        self._users[scattered] = [biases[0].name]

    def _add(self, like: Any, node: Any, source: str, groups: Any, dim: int) -> None:
        """Replaces a node by a reduce-scatter that is done as another collective."""
        made = node_def_pb2.NodeDef()
        made.CopyFrom(like)
        made.name, made.op, made.input[0] = node.name, SCATTER, source
        if SHAPES in node.attr:
            made.attr[SHAPES].CopyFrom(node.attr[SHAPES])
        self.nodes[node.name] = made
        self.program.sources[node.name] = source
        self.program.known_groups[node.name] = groups
        self.dims[node.name] = dim
        self._renamed[f"{node.name}:output:0"] = f"{node.name}:data:0"

    def _dim(self, part: Any, groups: Sequence[Sequence[int]]) -> int | None:
        """Along which dim a slice takes the parts of a group's members, one after the other.

        None if it takes others: DTensor cuts equally, in the order of the axis.
        """
        begins = self.program.values.get(node_of(part.input[1]))
        if begins is None:
            return None
        table = np.array([np.ravel(begin) for begin in begins])
        cut = np.flatnonzero(table.any(0))
        size = self.program.shape(f"{part.name}:output:0")
        whole = self.program.shape(part.input[0])
        if len(cut) != 1 or size.rank is None or whole.rank is None:
            return None
        dim = int(cut[0])
        count, width = len(groups[0]), size[dim]
        if width is None or whole[dim] != count * width:
            return None
        wanted = width * np.arange(count)
        right = all(np.array_equal(table[list(members), dim], wanted) for members in groups)
        return dim if right else None

    def _join(self, name: str) -> None:
        """Adds summands up before they are scattered, where the sums would be added afterwards."""
        join = self.nodes[name]
        alike: dict[Any, list[str]] = {}
        for reference in join.input:
            other = node_of(self._now(reference))
            if other in self.dims and len(self._users[other]) == 1:
                groups = tuple(map(tuple, self.program.known_groups[other]))
                shape = str(self.program.shape(f"{other}:data:0"))
                alike.setdefault((groups, self.dims[other], shape), []).append(other)
        for first, *others in alike.values():
            if others and (join.op == "AddN" or self._equal(name, first)):
                self._merge(name, [first, *others])

    def _equal(self, name: str, other: str) -> bool:
        """Whether an addition does not broadcast: its result has the shape of an operand."""
        shapes = [self.program.shape(one) for one in (f"{other}:data:0", f"{name}:z:0")]
        return shapes[0].is_fully_defined() and shapes[0].as_list() == shapes[1].as_list()

    def _merge(self, name: str, scattered: Sequence[str]) -> None:
        """One reduce-scatter of the sum of what several scatter."""
        first, *others = scattered
        node = self.nodes[first]
        sources = [self.program.sources[one] for one in scattered]
        total = node_def_pb2.NodeDef(name=f"{name}/summands", op="AddN", input=sources)
        total.attr["N"].i = len(sources)
        total.attr["T"].CopyFrom(node.attr["T"])
        shape = self.program.shape(sources[0])
        total.attr[SHAPES].list.shape.append(shape.as_proto())
        self.nodes[total.name] = total
        self.program.sources[first] = f"{total.name}:sum:0"
        node.input[0] = f"{total.name}:sum:0"
        join = self._own(name)
        join.input[:] = [r for r in join.input if node_of(self._now(r)) not in others]
        if join.op == "AddN":
            join.attr["N"].i = len(join.input)
        if len(join.input) == 1:
            result = "sum" if join.op == "AddN" else "z"
            self._renamed[f"{name}:{result}:0"] = f"{first}:data:0"
            self._users[first] = self._users[name]
        for one in others:
            del self.dims[one]
        gone = {k for k, v in self.instead.items() if v in others}
        self.instead |= dict.fromkeys(gone, "")

    def _own(self, name: str) -> Any:
        """A node of which this program may change the inputs: others have the same."""
        made = node_def_pb2.NodeDef()
        made.CopyFrom(self.nodes[name])
        self.nodes[name] = made
        return made


def _by_channel(node: Any) -> bool:
    """Whether a bias is of another dim than the last."""
    return "data_format" in node.attr and node.attr["data_format"].s == b"NCHW"
