"""What of a program runs as calls of functions, and which.

A program is copied to every device of a slice, once per micro-batch in a pipeline, and has a part
for each block of layers. What TensorFlow does with the graph of a step takes a time that grows with
its nodes. So what a device computes between two communications (`kdist.graphs.segments`) is one
function, and equal ones are the same function: on all devices, of all equal blocks, in all
micro-batches.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist._compat import dtensor_internals, function_graphs
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES, is_small
from kdist.graphs.chunks import Chunk, node_of
from kdist.graphs.instantiation import of_segments
from kdist.graphs.segments import segments

from tensorflow.core.framework import function_pb2, node_def_pb2

if TYPE_CHECKING:
    from kdist.dtensor.stitching import Stitcher

PREFIX = "kdist_segment_"
_names = (f"{PREFIX}{i}" for i in itertools.count())
_known: Any = weakref.WeakValueDictionary()
"""Functions that something still calls, by what they compute."""


class SegmentCall(NamedTuple):
    """A call of a segment's function.

    Attributes:
        node: The calling node of one device, without inputs.
        takes: References of its arguments.
        waits: Names of nodes that must be done before it.
    """

    node: Any
    takes: tuple[str, ...]
    waits: tuple[str, ...]


class Outlined:
    """The calls of a chunk of a program.

    Args:
        stitcher: Of the program.
        chunk: The chunk.

    Attributes:
        calls: The calls, with references of the program.
        functions: What they call, to be kept as long.
        left: Nodes of the chunk that run by themselves.
    """

    def __init__(self, stitcher: Stitcher, chunk: Chunk) -> None:
        self.calls: list[SegmentCall] = []
        self.functions: list[Any] = []
        self._stitcher = stitcher
        self._nodes = {name: stitcher.nodes[name] for name in chunk.nodes}
        self._constants = {n for n, node in self._nodes.items() if _is_constant(node)}
        self._call_of: dict[str, str] = {}
        self._given: dict[str, str] = {}
        read = {name: self._read(node) for name, node in self._nodes.items()}
        sources = {name: [*map(node_of, references)] for name, references in read.items()}
        self._core = _leading_to(sources, self._needed_everywhere(chunk))
        found = segments(sources, self._apart, self._constants)
        number = {name: i for i, nodes in enumerate(found) for name in nodes}
        gives: list[dict[str, None]] = [{} for _ in found]
        for name, references in (*read.items(), ("", chunk.gives)):
            for reference in references:
                made = number.get(node_of(reference))
                if made is not None and made != number.get(name) and reference[0] != "^":
                    gives[made][reference] = None
        for nodes, given in zip(found, gives, strict=True):
            self._add(nodes, [*given])
        outside = [references for name, references in read.items() if name not in self._call_of]
        used = {node_of(one) for references in (*outside, chunk.gives) for one in references}
        within = self._call_of.keys() | (self._constants - used)
        self.left = tuple(name for name in chunk.nodes if name not in within)

    def node(self, name: str) -> str:
        """The node that stands for one of the program: the call in which it runs, or itself."""
        return self._call_of.get(name, name)

    def reference(self, reference: str) -> str:
        """What stands for a reference of the program."""
        return self._given.get(reference, reference)

    def _read(self, node: Any) -> list[str]:
        """What a node takes and waits for, but for values that are known of each device."""
        read = self._stitcher.inputs_of(node)
        return [one for one in read if node_of(one) not in self._stitcher.folded]

    def _needed_everywhere(self, chunk: Chunk) -> list[str]:
        """Nodes of which each device needs what it has of them.

        What all devices have alike of a result, such as the gradient of a weight that is whole, is
        taken from one of them, and TensorFlow leaves out what leads to the others' alone: nodes,
        but not a part of a function.
        """
        program = self._stitcher.program
        layouts = zip(program.results, program.layouts, strict=True)
        alike = {one for one, layout in layouts if not _differs(layout, program.axes)}
        given = [node_of(one) for one in chunk.gives if one not in alike]
        return [*given, *filter(self._acts, self._nodes)]

    def _acts(self, name: str) -> bool:
        """Whether a node communicates or has an effect."""
        node = self._nodes[name]
        return node.op in COLLECTIVES or dtensor_internals.has_effects(node.op)

    def _apart(self, name: str) -> bool:
        """Whether a node is in no function."""
        values = self._nodes[name].attr.values()
        calls = any(value.HasField("func") or value.list.func for value in values)
        once = name in self._stitcher.program.once
        return calls or once or self._acts(name) or name not in self._core

    def _add(self, nodes: Sequence[str], gives: Sequence[str]) -> None:
        """Adds the call of a segment."""
        body = _Body(self._stitcher, nodes, self._constants)
        self.functions.append(function := body.function(gives))
        name = f"{nodes[-1]}/kdist_segment"
        self._call_of |= dict.fromkeys(nodes, name)
        self._given |= {one: f"{name}:output:{i}" for i, one in enumerate(gives)}
        waits = [one for one in body.waits if one in self._nodes]
        waits = [one for one in waits if self._nodes[one].op not in COLLECTIVES]
        call = node_def_pb2.NodeDef(name=name, op="PartitionedCall")
        call.attr["f"].func.name = function.name
        call.attr["Tin"].list.type.extend(map(self._stitcher.dtype, body.takes))
        call.attr["Tout"].list.type.extend(map(self._stitcher.dtype, gives))
        call.attr["config_proto"].s = of_segments()
        call.attr[SHAPES].list.shape.extend(self._stitcher.shape(one).as_proto() for one in gives)
        self.calls.append(SegmentCall(call, tuple(body.takes), tuple(waits)))


class _Body:
    """The nodes of a segment as the body of a function, under numbers in place of names.

    Args:
        stitcher: Of the program.
        nodes: The segment.
        constants: Of which each function has its own.

    Attributes:
        takes: By reference of the program, the argument that stands for it.
        waits: Nodes of the program, outside, that must be done before a call.
    """

    def __init__(self, stitcher: Stitcher, nodes: Sequence[str], constants: set[str]) -> None:
        self.takes: dict[str, str] = {}
        self.waits: dict[str, None] = {}
        self._stitcher, self._constants = stitcher, constants
        self._definition = function_pb2.FunctionDef()
        self._numbers: dict[str, int] = {}
        self._passed_on: dict[str, str] = {}
        for name in nodes:
            node = stitcher.as_made(stitcher.nodes[name])
            if node.op == "Identity" and len(node.input) == 1 and name not in stitcher.again:
                self._passed_on[name] = self._reference(node.input[0])
            else:
                self._add(node)

    def function(self, gives: Sequence[str]) -> Any:
        """The function: one that is known, if it computes the same.

        Args:
            gives: References of the program that it returns.
        """
        dtype, signature = self._stitcher.dtype, self._definition.signature
        for i, reference in enumerate(gives):
            signature.output_arg.add(name=f"out_{i}", type=dtype(reference))
            self._definition.ret[f"out_{i}"] = self._reference(reference)
        for reference, argument in self.takes.items():
            signature.input_arg.add(name=argument, type=dtype(reference))
        elsewhere = function_graphs.takes_resources(self._definition)
        for name, value in function_graphs.of_one_device(elsewhere=elsewhere).items():
            self._definition.attr[name].b = value
        key = hashlib.sha256(self._definition.SerializeToString(deterministic=True)).digest()
        if (known := _known.get(key)) is None:
            signature.name = next(_names)
            _known[key] = known = dtensor_internals.Registered(self._named(), pure=True)
        return known

    def _add(self, node: Any) -> None:
        data = [self._reference(one) for one in node.input if one[0] != "^"]
        waits = [one for one in (self._wait(r[1:]) for r in node.input if r[0] == "^") if one]
        self._numbers[node.name] = len(self._numbers)
        made = self._definition.node_def.add()
        made.CopyFrom(node)
        made.name = _numbered(self._numbers[node.name])
        made.ClearField("experimental_debug_info")
        made.input[:] = [*data, *dict.fromkeys(waits)]

    def _reference(self, reference: str) -> str:
        """What a reference of the program is in the function."""
        name = node_of(reference)
        if name in self._passed_on:
            return self._passed_on[name]
        if name in self._constants and name not in self._numbers:
            constant = node_def_pb2.NodeDef()
            constant.CopyFrom(self._stitcher.as_made(self._stitcher.nodes[name]))
            del constant.input[:]
            self._add(constant)
        if name in self._numbers:
            return _numbered(self._numbers[name]) + reference[len(name) :]
        return self.takes.setdefault(reference, f"in_{len(self.takes)}")

    def _wait(self, name: str) -> str:
        """An edge from a node of the program; none if that is done when the function is called."""
        if name in self._numbers:
            return f"^{_numbered(self._numbers[name])}"
        if name in self._passed_on:
            source = node_of(self._passed_on[name])
            return "" if source in self.takes.values() else f"^{source}"
        if name not in self._constants:
            self.waits[name] = None
        return ""

    def _named(self) -> Any:
        """The definition with the names that its nodes have in the program, for messages."""
        names = {_numbered(i): name for name, i in self._numbers.items()}
        named = function_pb2.FunctionDef()
        named.CopyFrom(self._definition)
        for node in named.node_def:
            node.name = names[node.name]
            node.input[:] = [_renamed(one, names) for one in node.input]
        for result, reference in self._definition.ret.items():
            named.ret[result] = _renamed(reference, names)
        return named


def _leading_to(sources: Mapping[str, Sequence[str]], nodes: Iterable[str]) -> set[str]:
    """Some nodes, and those before them."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        name = waiting.pop()
        if name in sources and name not in found:
            found.add(name)
            waiting.extend(sources[name])
    return found


def _differs(layout: Any, axes: Mapping[str, int]) -> bool:
    """Whether each device has another part of a tensor."""
    return all(axis in layout.sharding_specs for axis, size in axes.items() if size > 1)


def _numbered(number: int) -> str:
    return f"n{number}"


def _renamed(reference: str, names: Mapping[str, str]) -> str:
    edge, name = reference[: reference[0] == "^"], node_of(reference)
    return edge + names.get(name, name) + reference[len(edge) + len(name) :]


def _is_constant(node: Any) -> bool:
    return node.op == "Const" and is_small(node)
