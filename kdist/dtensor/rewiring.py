"""Other nodes in the place of some of a program's, and references to what they give."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.lowered import Collective
from kdist.graphs.chunks import node_of
from kdist.graphs.layer_names import together

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

if TYPE_CHECKING:
    from kdist.dtensor.stitching import Stitcher

PASSED = frozenset({"Identity", "Reshape"})
"""What hands on a tensor, whatever it is."""
_EACH = "IdentityN"


class Rewiring:
    """Changes nodes of a program, which others may have in common with it, in copies.

    Args:
        program: What stitches the program; `finish` gives it the nodes.

    Attributes:
        nodes: By name.
        changed: Whether anything is.
    """

    def __init__(self, program: Stitcher) -> None:
        self.program, self.nodes, self.changed = program, program.nodes, False
        self._instead: dict[str, list[str]] = {}
        self._parts: dict[str, list[str]] = {}
        self._gone: set[str] = set()
        # Functions with gradients of their own hand on what they took beside what they made.
        self._renamed: dict[str, str] = {
            f"{name}:output:{i}": reference
            for name in program.live
            if self._only_hands_on(self.nodes[name])
            for i, reference in enumerate(self.nodes[name].input)
        }
        self.users: dict[str, list[str]] = {}
        """By name, the nodes that take what a node gives, as often as they do; "" is a result."""
        for name in program.live:
            if not self._only_hands_on(self.nodes[name]):
                for reference in program.inputs_of(self.nodes[name]):
                    self.users.setdefault(node_of(self.now(reference)), []).append(name)
        for reference in program.program.results:
            self.users.setdefault(node_of(self.now(reference)), []).append("")

    @staticmethod
    def _only_hands_on(node: Any) -> bool:
        """Whether a node gives what it takes, and waits for nothing else."""
        return node.op == _EACH and not any(one.startswith("^") for one in node.input)

    def now(self, reference: str) -> str:
        """What stands for a reference of the program before."""
        while reference in self._renamed:
            reference = self._renamed[reference]
        return reference

    def rename(self, reference: str, instead: str) -> None:
        """Lets what takes a tensor take another one."""
        self._renamed[reference] = instead

    def only_user(self, name: str) -> Any:
        """The one node that takes what a node gives; None if there are several, or a result."""
        users = self.users.get(name, [])
        node = self.nodes[users[0]] if len(users) == 1 and users[0] else None
        if node is None or node_of(self.now(node.input[0])) != name:
            return None
        return node

    def passed(self, node: Any, ops: Collection[str]) -> tuple[list[Any], Any]:
        """Operations of some kinds, one after the other, and what takes what the last one gives."""
        found: list[Any] = []
        while node is not None and node.op in ops and not by_channel(node):
            found.append(node)
            node = self.only_user(node.name)
        return found, node

    def own(self, name: str) -> Any:
        """A copy of a node in its place, to be changed."""
        made = node_def_pb2.NodeDef()
        made.CopyFrom(self.nodes[name])
        self.nodes[name] = made
        self.changed = True
        return made

    def collective(self, like: Any, node: Any, op: str, source: str, result: str) -> None:
        """Replaces a node by a collective that is done as another one is.

        Args:
            like: The other one.
            node: The node.
            op: The collective's operation.
            source: Reference of what it takes.
            result: Name of the node's output.
        """
        groups = self.program.groups(like)
        made = self.own(node.name)
        made.CopyFrom(like)
        made.name, made.op, made.input[0] = node.name, op, source
        if SHAPES in node.attr:
            made.attr[SHAPES].CopyFrom(node.attr[SHAPES])
        self.program.sources[node.name] = source
        self.program.known_groups[node.name] = groups
        self.rename(f"{node.name}:{result}:0", f"{node.name}:data:0")
        self._instead.setdefault(like.name, []).append(node.name)

    def part_of(self, name: str, others: Sequence[str]) -> None:
        """Notes that a collective does what others did."""
        inner = [part for other in others for part in self._parts.pop(other, ())]
        self._parts.setdefault(name, []).extend([*others, *inner])

    def gone(self, name: str) -> None:
        """Notes that nothing takes what a collective gives."""
        self._gone.add(name)
        self.changed = True

    def finish(self) -> None:
        """Gives the program the nodes, its results, and the collectives as they are now."""
        for name in [*self.nodes]:
            if any(one in self._renamed for one in self.nodes[name].input):
                self.own(name).input[:] = [*map(self.now, self.nodes[name].input)]
        program = self.program
        program.sources |= {name: self.now(one) for name, one in program.sources.items()}
        results = tuple(map(self.now, program.program.results))
        program.program = dataclasses.replace(program.program, results=results)
        program.recorded = self._described(program.recorded)

    def _described(self, collectives: Sequence[Collective]) -> tuple[Collective, ...]:
        found = {name: one for one in collectives for name in self._now_at(one.node)}
        parts = {part for some in self._parts.values() for part in some}
        return tuple(
            self._description(self._of_layers(one, name, found), name)
            for name, one in found.items()
            if name not in parts | self._gone
        )

    def _of_layers(self, one: Collective, name: str, found: Mapping[str, Collective]) -> Collective:
        """A collective with the layers of all whose sums it sends."""
        layers = [one.layer, *(found[part].layer for part in self._parts.get(name, ()))]
        return dataclasses.replace(one, layer=together(layers))

    def _now_at(self, name: str) -> list[str]:
        """The nodes at which a collective is done: one that is moved may move again."""
        if name not in self._instead:
            return [name]
        return [last for one in self._instead[name] for last in self._now_at(one)]

    def _description(self, one: Collective, name: str) -> Collective:
        """What is told of a collective that is done at another node, perhaps in another way."""
        scattered = name in self.program.cut_dims
        if scattered and one.kind == "all-reduce":
            return dataclasses.replace(one, kind="reduce-scatter", node=name)
        if name == one.node:
            return one
        kind = "all-reduce" if self.nodes[name].op == "CollectiveReduceV2" else one.kind
        kind = "reduce-scatter" if scattered else kind
        told = self.program.sources[name] if scattered else f"{name}:data:0"
        shape, nbytes = self.program.shape(told), one.bytes
        if shape.is_fully_defined():
            nbytes = shape.num_elements() * tf.as_dtype(one.dtype).size
            one = dataclasses.replace(one, shape=tuple(shape))
        return dataclasses.replace(one, kind=kind, bytes=nbytes, node=name)


def by_channel(node: Any) -> bool:
    """Whether a bias is of another dim than the last."""
    return "data_format" in node.attr and node.attr["data_format"].s == b"NCHW"
