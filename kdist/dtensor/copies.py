"""The copies of a program's nodes on the devices of a slice, as one function definition."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist._compat import dtensor_internals, xla_clusters
from kdist.dtensor.collectives import (
    COLLECTIVES,
    TABLE,
    CollectiveNodes,
    add_constant,
    gather_blocks,
)
from kdist.dtensor.device_number import SHAPES, without_notes
from kdist.dtensor.outlining import Outlined, SegmentCall
from kdist.dtensor.stitched import VARIANT
from kdist.graphs.chunks import Chunk, node_of
from kdist.sharding.device import Device

import numpy as np
from tensorflow.core.framework import function_pb2

if TYPE_CHECKING:
    from kdist.dtensor.stitching import Stitcher

PREFIX = "kdist_stitched_"
_names = (f"{PREFIX}{i}" for i in itertools.count())


class Bodies:
    """The functions of a program's loops and branches, under names that no other program has.

    DTensor names them alike in all programs, and forgets them with the program.
    """

    def __init__(self, definitions: Mapping[str, Any], untouched: frozenset[str]) -> None:
        self._names = {name: f"{next(_names)}_{name}" for name in definitions}
        self._registered = []
        for definition in definitions.values():
            copy = function_pb2.FunctionDef()
            copy.CopyFrom(definition)
            copy.signature.name = self._names[definition.signature.name]
            if definition.signature.name not in untouched:
                del copy.node_def[:]
                copy.node_def.extend(map(without_notes, definition.node_def))
            for node in copy.node_def:
                self.renamed(node)
            self._registered.append(dtensor_internals.Registered(copy))

    def renamed(self, node: Any) -> Any:
        """The node, with the functions that it calls under their new names."""
        for value in node.attr.values():
            for function in (value.func, *value.list.func):
                if function.name in self._names:
                    function.name = self._names[function.name]
        return node


class Copies:
    """The copies of a program on the devices of one slice, as one function definition.

    Args:
        stitcher: Of the program.
        devices: Of the slice.
        chunk: What of the program it runs.
        clusters: Mark what XLA is to compile.
        awaited: Whether what waits for a call waits for all that it returns.
    """

    def __init__(
        self,
        stitcher: Stitcher,
        devices: Sequence[str],
        chunk: Chunk,
        *,
        clusters: bool,
        awaited: bool,
    ) -> None:
        self.stitcher, self.devices, self.chunk = stitcher, list(devices), chunk
        self.clusters = clusters
        self.program = stitcher.program
        self.taken = {reference: i for i, reference in enumerate(chunk.takes)}
        self.inside = set(chunk.nodes)
        self.definition = function_pb2.FunctionDef()
        self.definition.signature.name = next(_names)
        self.results: dict[tuple[str, int], str] = {}
        self.constants: dict[tuple[str, int], str] = {}
        self._turns = itertools.count()
        self.outlined = Outlined(stitcher, chunk) if self._outlines() else None
        self._add_inputs()
        for name in chunk.nodes if self.outlined is None else self.outlined.left:
            node = stitcher.nodes[name]
            if node.op in COLLECTIVES:
                self._add_collective(node)
            else:
                self._add_copies(stitcher.bodies.renamed(stitcher.as_made(node)))
        for call in () if self.outlined is None else self.outlined.calls:
            self._add_call(call)  # when it is known what the members of collectives get
        self._add_outputs()
        if awaited:
            self._add_ends()

    @property
    def calls(self) -> list[Any]:
        """What has to live as long as the definition: the functions that it calls."""
        return [self.stitcher.bodies, *(self.outlined.functions if self.outlined else ())]

    def _outlines(self) -> bool:
        """Whether what lies between two communications becomes calls.

        XLA is told node by node what to compile; on GPUs it is not known what calls cost a step.
        """
        if len(self.devices) == 1 or self.clusters or not self.stitcher.outlined:
            return False
        return all(Device.parse(one).kind == "CPU" for one in self.devices)

    def _add_inputs(self) -> None:
        for k in range(self.program.size):
            for i, reference in enumerate(self.chunk.takes):
                dtype = self.stitcher.dtype(reference)
                self.definition.signature.input_arg.add(name=f"in_{k}_{i}", type=dtype)

    def _add_outputs(self) -> None:
        for k in range(self.program.size):
            for i, reference in enumerate(self.chunk.gives):
                name = f"out_{k}_{i}"
                dtype = self.stitcher.dtype(reference)
                self.definition.signature.output_arg.add(name=name, type=dtype)
                self.definition.ret[name] = self._reference(reference, k)
            for i, node in enumerate(n for n in self.stitcher.effects if n in self.inside):
                if k and node in self.program.once:
                    continue
                name = f"done_{k}_{i}"
                self.definition.signature.control_output.append(name)
                self.definition.control_ret[name] = f"{_on(k)}/{node}"

    def _add_ends(self) -> None:
        """One operation per device that comes after all that is returned from there.

        A function of several devices becomes part of the graph that calls it, and what waits for
        the call then waits for these.
        """
        made = {node.name for node in self.definition.node_def}
        for k, device in enumerate(self.devices):
            given = [self.definition.ret[f"out_{k}_{i}"] for i in range(len(self.chunk.gives))]
            end = self.definition.node_def.add(name=f"{_on(k)}/kdist_end", op="NoOp", device=device)
            waits = dict.fromkeys(name for one in given if (name := node_of(one)) in made)
            end.input.extend(f"^{name}" for name in waits)
            self.definition.signature.control_output.append(f"end_{k}")
            self.definition.control_ret[f"end_{k}"] = end.name

    def _add_copies(self, node: Any) -> None:
        data = [one for one in node.input if not one.startswith("^")]
        waits = [one[1:] for one in node.input if one.startswith("^")]
        waits = [one for one in waits if self.stitcher.nodes[one].op not in COLLECTIVES]
        waits = [one for one in waits if one in self.inside]
        once = node.name in self.program.once
        if self.clusters and self._compiles(node):
            xla_clusters.mark(node, self.definition.signature.name)
        for k, device in enumerate(self.devices[:1] if once else self.devices):
            copy = self.definition.node_def.add()
            copy.CopyFrom(node)
            copy.name, copy.device = f"{_on(k)}/{node.name}", device
            if len(self.devices) > 1:  # whose function becomes part of the graph that calls it
                xla_clusters.stays_a_call(copy)
            del copy.input[:]
            copy.input.extend(self._reference(one, k) for one in data)
            copy.input.extend(self._edges(waits, k))

    def _add_call(self, call: SegmentCall) -> None:
        """A call of what lies between two communications, on each device."""
        for k, device in enumerate(self.devices):
            copy = self.definition.node_def.add()
            copy.CopyFrom(call.node)
            copy.name, copy.device = f"{_on(k)}/{call.node.name}", device
            copy.input.extend(self._reference(one, k) for one in call.takes)
            copy.input.extend(self._edges(call.waits, k))

    def _edges(self, waits: Iterable[str], k: int) -> list[str]:
        """Edges from nodes of the program to one of the copy for device `k`."""
        nodes = (f"^{self._on(one, k)}/{self._node(one)}" for one in waits)
        return [*dict.fromkeys(nodes)]

    def _node(self, name: str) -> str:
        return name if self.outlined is None else self.outlined.node(name)

    def _compiles(self, node: Any) -> bool:
        """Whether XLA may take a node.

        It draws other random numbers than TensorFlow, and keeps lists of tensors to itself.
        """
        dtypes = [t for of in dtensor_internals.output_dtypes(node).values() for t in of]
        taken = [one for one in node.input if not one.startswith("^")]
        lists = VARIANT in [*dtypes, *map(self.stitcher.dtype, taken)]
        return not lists and not node.op.startswith("Stateless")

    def _add_collective(self, node: Any) -> None:
        source = self.stitcher.source(node)
        begins = self.stitcher.begins.get(node.name)
        known = self.stitcher.turns.get(node.name)
        for g, members in enumerate(self.stitcher.groups(node)):
            turn = next(self._turns) if known is None else known
            group = CollectiveNodes(
                self.definition,
                self.devices,
                f"{node.name}/group{g}",
                members,
                [self._reference(source, k) for k in members],
                node.attr["T"].type,
                members[turn % len(members)],
                self.stitcher.cut_dims.get(node.name, 0),
            )
            if begins is not None:
                values = gather_blocks(group, [begins[k] for k in members])
            else:
                values = TABLE[node.op](node, group)
            for k, value in zip(members, values, strict=True):
                self.results[node.name, k] = value
                if node_of(value) in group.nodes and SHAPES in node.attr:
                    group.nodes[node_of(value)].attr[SHAPES].CopyFrom(node.attr[SHAPES])

    def _reference(self, reference: str, k: int) -> str:
        """What a reference of the program is in the copy for device `k`."""
        name = node_of(reference)
        if name == self.stitcher.number:
            return self._constant(name, k, np.int32(k))
        if reference in self.taken:
            return f"in_{k}_{self.taken[reference]}"
        if name in self.stitcher.folded:
            return self._constant(name, k, self.stitcher.values[name][k])
        if (name, k) in self.results:
            return self.results[name, k]
        if self.outlined is not None:
            reference = self.outlined.reference(reference)
        return f"{self._on(name, k)}/{reference}"

    def _on(self, name: str, k: int) -> str:
        """Scope of the copy of a node that the copies for device `k` read."""
        return _on(0 if name in self.program.once else k)

    def _constant(self, name: str, k: int, value: Any) -> str:
        if (name, k) not in self.constants:
            self.constants[name, k] = add_constant(
                self.definition, f"{_on(k)}/known/{name}", self.devices[k], np.asarray(value)
            )
        return self.constants[name, k]


def _on(device: int) -> str:
    """Scope of the copies for a device."""
    return f"on{device}"
