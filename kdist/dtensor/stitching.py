"""One function of all devices of a slice, made of the program that each of them would run.

The program's nodes are copied once per device. What depends on the device's number is known there
(`device_number`), and collectives become operations between the copies (`collectives`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kdist._compat import dtensor_internals, function_graphs
from kdist.dtensor.body import topological
from kdist.dtensor.collective_dtypes import GATHER
from kdist.dtensor.collectives import (
    COLLECTIVES,
    TABLE,
    CannotStitch,
)
from kdist.dtensor.copies import Bodies, Copies
from kdist.dtensor.device_number import (
    SHAPES,
    is_small,
    known_nodes,
    values_on_devices,
    without_notes,
)
from kdist.dtensor.handed_on import handed_on, redirected
from kdist.dtensor.joined_sums import join_sums
from kdist.dtensor.looked_up_parts import look_up_parts
from kdist.dtensor.lowered_program import LoweredProgram
from kdist.dtensor.partial_sums import Summands, Summed
from kdist.dtensor.rewiring import Rewiring
from kdist.dtensor.scattered_sums import scatter
from kdist.dtensor.stitched import VARIANT, StitchedFunction
from kdist.dtensor.straight_gathers import straighten
from kdist.dtensor.undone_gathers import undo_gathers
from kdist.graphs.chunks import Chunk, ProgramGraph, node_of
from kdist.graphs.recompute import Repeated

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2


class Stitcher:
    """Makes functions of all devices of a slice.

    Args:
        program: The program of one device.
        summed: What it hands out as summands, if anything.
        outlined: Whether what lies between two communications becomes calls; see
            `kdist.dtensor.outlining`. Not where nodes run again: a call holds what it is given
            until it ends, which is part of what is to be saved.
        rewired: Whether collectives do what DTensor's nodes around them do: see
            `kdist.dtensor.scattered_sums`, `kdist.dtensor.joined_sums`,
            `kdist.dtensor.straight_gathers` and `kdist.dtensor.undone_gathers`.

    Raises:
        CannotStitch: It has a collective inside a loop or a branch, or one of an unknown kind.
    """

    def __init__(
        self,
        program: LoweredProgram,
        summed: Summed | None = None,
        *,
        outlined: bool = True,
        rewired: bool = True,
    ) -> None:
        made = {node.name: node for node in program.definition.node_def}
        instead = handed_on(made, program.bodies)
        results = tuple(instead.get(one, one) for one in program.results)
        program = dataclasses.replace(program, results=results)
        self.program, self.outlined = program, outlined
        self.nodes = redirected(made, instead)
        self.inputs = {one.name: i for i, one in enumerate(program.arguments)}
        self.number = next((one.name for one in program.arguments if one.position is None), "")
        self.summands: Summands | None = None
        self.known_groups: dict[str, list[list[int]]] = {}
        self.sources: dict[str, str] = {}
        self.again: frozenset[str] = frozenset()
        self.arrivals: frozenset[str] = frozenset()
        self.originals: dict[str, str] = {}
        self.turns: dict[str, int] = {}
        """By collective, whose turn it is; of others members take turns as they come."""
        order = topological(self.nodes)
        known = known_nodes(self.nodes, order, self.number)
        self.folded = {n for n, by_number in known.items() if by_number and is_small(self.nodes[n])}
        asked = self.folded | {n for n in self._asked() if n in known}
        self.values = values_on_devices(self.nodes, sorted(asked), self.number, program.size)
        self.begins = dict(program.gathers) or {
            n: begins for n in order if (begins := self._begins(n)) is not None
        }
        self.effects = [
            name
            for name, node in self.nodes.items()
            if node.op not in COLLECTIVES and dtensor_internals.has_effects(node.op)
        ]
        if summed is not None:
            self.summands = Summands(self, summed)
            self.program = program = dataclasses.replace(program, results=self.summands.results)
            order = topological(self.nodes)
        live = self._live()
        self.recorded = program.collectives
        if self.summands is not None:
            self.recorded = self.summands.not_left(program.collectives, live)
        self.live = [name for name in order if name in live]
        self.cut_dims: dict[str, int] = {}
        """By reduce-scatter, the dim of which each member gets a part."""
        if rewired:
            self._rewire()
        self.bodies = Bodies(program.bodies, program.untouched)
        self._refuse_bodies()

    def _rewire(self) -> None:
        """Lets collectives do what several of DTensor's nodes do."""
        rewiring = Rewiring(self)
        look_up_parts(rewiring)
        straighten(rewiring)
        if undo_gathers(rewiring):
            self._finish(rewiring)
            rewiring = Rewiring(self)
        scatter(rewiring)
        join_sums(rewiring)
        if rewiring.changed:
            self._finish(rewiring)

    def _finish(self, rewiring: Rewiring) -> None:
        rewiring.finish()
        live = self._live()
        self.live = [name for name in topological(self.nodes) if name in live]

    @property
    def graph(self) -> ProgramGraph:
        """What there is to cut into chunks."""
        return ProgramGraph(
            inputs={
                name: [r for r in self.inputs_of(self.nodes[name]) if node_of(r) not in self.folded]
                for name in self.live
            },
            results=[r for r in self.program.results if node_of(r) not in self.folded],
            effects=self.effects,
            constants={
                n for n in self.live if self.nodes[n].op == "Const" and is_small(self.nodes[n])
            },
            again=self.again,
            arrivals=self.arrivals,
        )

    def repeat(self, repeated: Repeated) -> None:
        """Adds copies of nodes that run again in the backward pass.

        Args:
            repeated: What `kdist.graphs.recompute.repeat` made of `graph`.
        """
        for copy, name in repeated.originals.items():
            self.nodes[copy] = made = node_def_pb2.NodeDef()
            made.CopyFrom(self.nodes[name])
            made.name = copy
            del made.input[:]
            made.input.extend(r for r in self.nodes[name].input if not r.startswith("^"))
            if made.op in COLLECTIVES:
                self.sources[copy] = self.source(self.nodes[name])
                self.known_groups[copy] = self.groups(self.nodes[name])
            if name in self.begins:
                self.begins[copy] = self.begins[name]
            if name in self.cut_dims:
                self.cut_dims[copy] = self.cut_dims[name]
        for name, renamed in repeated.references.items():
            node = self.nodes[name]
            if node.op in COLLECTIVES:
                source = self.source(node)
                self.sources[name] = renamed.get(source, source)
            else:
                node.input[:] = [renamed.get(r, r) for r in node.input]
        for name, taken in repeated.gates.items():
            self.nodes[name] = gate = node_def_pb2.NodeDef(name=name, op="Identity", input=taken)
            gate.attr["T"].type = self.dtype(taken[0])
        self.originals.update(repeated.originals)
        self.again = frozenset(repeated.graph.again)
        self.arrivals = frozenset(repeated.graph.arrivals)
        self.live = list(repeated.graph.inputs)

    def stitch(
        self,
        devices: Sequence[str],
        chunk: Chunk | None = None,
        *,
        jit_compile: bool = False,
        awaited: bool = False,
    ) -> StitchedFunction:
        """The function of one slice.

        Args:
            devices: Full names of its devices, in the order of the mesh. One without a name stands
                for any that calls the function.
            chunk: The part of the program that it runs; all of it by default.
            jit_compile: Compile it with XLA: whole, on one device; on several, what each of them
                computes between two collectives.
            awaited: Whether what waits for a call is to wait for all that it returns.

        Raises:
            ValueError: XLA is to compile what takes or returns lists of tensors, as a whole.
        """
        if chunk is None:
            taken = tuple(one.name for one in self.program.arguments if one.position is not None)
            chunk = Chunk(taken, tuple(self.live), self.program.results)
        apart = jit_compile and len(devices) > 1
        waits = awaited and len(devices) > 1
        copies = Copies(self, devices, chunk, clusters=apart, awaited=waits)
        definition = copies.definition
        pure = not set(self.effects) & set(chunk.nodes)
        # Graphs that call it on several devices then are not the larger for it.
        if devices == [""]:
            elsewhere = function_graphs.takes_resources(definition)
            for name, value in function_graphs.of_one_device(elsewhere=elsewhere).items():
                definition.attr[name].b = value
        shapes = [self.shape(reference) for reference in chunk.gives]
        size = self.program.size
        function = StitchedFunction(definition, chunk, shapes, size, copies.calls, pure=pure)
        if jit_compile and not apart:
            function.compile([r for r in (*chunk.takes, *chunk.gives) if self.dtype(r) == VARIANT])
        return function

    def dtype(self, reference: str) -> int:
        """Of a tensor of the program, as an enumeration value."""
        name = node_of(reference)
        if name in self.inputs:
            return self.program.definition.signature.input_arg[self.inputs[name]].type
        _, output, index = reference.split(":")
        return dtensor_internals.output_dtypes(self.nodes[name])[output][int(index)]

    def shape(self, reference: str) -> tf.TensorShape:
        """Of a tensor of the program, as far as it is known."""
        name = node_of(reference)
        if name in self.inputs:
            arguments, position = self.program.definition.arg_attr, self.inputs[name]
            unknown = tf.TensorShape(None)
            return _noted(arguments[position], 0) if position in arguments else unknown
        _, output, index = reference.split(":")
        number = int(index)
        if name in self.again and name not in self.originals:
            return self.shape(self.nodes[name].input[0])
        name = self.originals.get(name, name)
        for kind, dtypes in dtensor_internals.output_dtypes(self.nodes[name]).items():
            if kind == output:
                break
            number += len(dtypes)
        if self.program.shape is not None:
            return self.program.shape(name, number)
        return _noted(self.nodes[name], number)

    def inputs_of(self, node: Any) -> Sequence[str]:
        """What goes into a node; edges between collectives only order them."""
        return [self.source(node)] if node.op in COLLECTIVES else list(node.input)

    def as_made(self, node: Any) -> Any:
        """A copy of a node, without what DTensor noted on it."""
        if self.originals.get(node.name, node.name) not in self.program.untouched:
            return without_notes(node)
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        return copy

    def source(self, node: Any) -> str:
        """What a collective is applied to on one device."""
        if node.name in self.sources:
            return self.sources[node.name]
        if node.name in self.begins:
            padded = self.nodes[node_of(node.input[0])]
            return str(padded.input[4])
        return str(node.input[0])

    def groups(self, node: Any) -> list[list[int]]:
        """The devices that take part in a collective together: those with one group key."""
        if node.name in self.known_groups:
            return self.known_groups[node.name]
        keys = self.values.get(node_of(node.input[2]))
        if keys is None:
            raise CannotStitch(f"{node.op} of a group that is not known ({node.name})")
        found: dict[int, list[int]] = {}
        for k, key in enumerate(keys):
            found.setdefault(int(np.ravel(key)[0]), []).append(k)
        return list(found.values())

    def _asked(self) -> Iterator[str]:
        """Nodes whose values must be known: group keys, and where a gather puts each part."""
        for node in self.nodes.values():
            if node.op in COLLECTIVES:
                yield node_of(node.input[2])
            elif node.op == "TensorStridedSliceUpdate":
                yield from map(node_of, node.input[1:3])

    def _begins(self, name: str) -> list[tuple[int, ...]] | None:
        """Where each device's part begins, if a collective gathers parts; None for others.

        On CPU, DTensor gathers by a sum of tensors that are zero outside of the device's own part.
        """
        node = self.nodes[name]
        if node.op != "CollectiveReduceV2" or GATHER not in name:
            return None
        padded = self.nodes.get(node_of(node.input[0]))
        if padded is None or padded.op != "TensorStridedSliceUpdate":
            return None
        if not self._is_zero(padded.input[0]):
            return None
        begins = self.values.get(node_of(padded.input[1]))
        if begins is None:
            return None
        return [tuple(map(int, np.ravel(begin))) for begin in begins]

    def _is_zero(self, reference: str) -> bool:
        """Whether a tensor is known to be zero: of float8, nothing has made it a constant."""
        node = self.nodes.get(node_of(reference))
        if node is not None and node.op in ("Fill", "Cast"):
            return self._is_zero(node.input[1 if node.op == "Fill" else 0])
        if node is None or node.op != "Const":
            return False
        return not np.any(tf.make_ndarray(node.attr["value"].tensor))

    def _live(self) -> set[str]:
        """The nodes that results and effects need, copies of inputs and known values left out."""
        found: set[str] = set()
        stack = [*self.program.results, *self.effects]
        while stack:
            name = node_of(stack.pop())
            if name in found or name in self.folded or name in self.inputs:
                continue
            found.add(name)
            node = self.nodes[name]
            stack.extend(self.inputs_of(node))
        return found

    def _refuse_bodies(self) -> None:
        for name in self.live:
            node = self.nodes[name]
            if node.op in COLLECTIVES and node.op not in TABLE:
                raise CannotStitch(f"{node.op} ({name})")
        for name, body in self.program.bodies.items():
            if any(node.op in COLLECTIVES for node in body.node_def):
                raise CannotStitch(f"collectives in the body of a loop or branch ({name})")


def _noted(node: Any, number: int) -> tf.TensorShape:
    """The shape of an output as DTensor noted it."""
    # To look up what is not there would add it, and TensorFlow refuses an empty attribute.
    shapes = node.attr[SHAPES].list.shape if SHAPES in node.attr else ()
    return tf.TensorShape(shapes[number]) if shapes else tf.TensorShape(None)
