"""Running a program chunk by chunk on every slice, in the graph of a step.

Before a chunk, the parameters that are not stored whole are gathered for it; after it, the update
may reduce the gradients that are complete. Where memory counts, nothing runs far ahead: parameters
of a chunk are gathered when the chunk before it starts, and a chunk starts when the gradients of
the last but `IN_FLIGHT` have been reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist.dtensor.stitched import StitchedFunction
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import Chunk, node_of
from kdist.graphs.instantiation import instantiated_cheaply

import tensorflow as tf

IN_FLIGHT = 1
"""Chunks whose parameters, or gradients, may be on their way while another one computes."""

Gather = Callable[[Sequence[int], Sequence[Sequence[Any]]], list[dict[int, list[Any]]]]
"""(positions of parameters, per slice what to wait for) -> per slice and position, its parts."""
Progress = Callable[[list[dict[int, list[Any]]]], Sequence[Any]]
"""(per slice, results so far: their parts) -> operations that later chunks wait for."""


class ChunkedProgram:
    """A program in chunks.

    Args:
        stitcher: Of the program.
        chunks: What `kdist.graphs.chunks.cut` made of it.
        devices: Those of every slice; of one device, functions are the same for all slices.
        fetched: Positions of the parameters that are gathered.
        jit_compile: Compile each chunk with XLA.

    Attributes:
        fetched: Per chunk, the positions of the parameters that are gathered for it.
    """

    def __init__(
        self,
        stitcher: Stitcher,
        chunks: Sequence[Chunk],
        devices: Sequence[Sequence[str]],
        fetched: Sequence[int],
        *,
        jit_compile: bool = False,
    ) -> None:
        self.jit_compile = jit_compile
        self.stitcher, self.chunks, self.devices = stitcher, list(chunks), list(devices)
        arguments = stitcher.program.arguments
        self.names = {one.name: one.position for one in arguments if one.position is not None}
        wanted = set(fetched)
        self.fetched = [
            [self.names[r] for r in one.takes if self.names.get(r) in wanted] for one in chunks
        ]
        self._functions: dict[tuple[int, int], StitchedFunction] = {}

    def function(self, number: int, s: int) -> StitchedFunction:
        """The function of a chunk on a slice."""
        one_device = len(self.devices[s]) == 1
        key = number, 0 if one_device else s
        if key not in self._functions:
            devices = [""] if one_device else self.devices[s]
            self._functions[key] = self.stitcher.stitch(
                devices, self.chunks[number], jit_compile=self.jit_compile
            )
        return self._functions[key]


class ChunkRun:
    """One pass over the chunks of a program, on all slices.

    Args:
        programs: Per slice, the program: one for all, but for sizes.
        given: Per slice and position of a flat input, its parts; None for what is gathered.
        gather: Gathers parameters.
        progress: Told after each chunk what results there are.
        before: Per slice, operations that end the pass before this one in the same step.
        keep: Positions of parameters that are kept for the chunks that use them again.
        free: Whether chunks wait for what `progress` returns.
    """

    def __init__(
        self,
        programs: Sequence[ChunkedProgram],
        given: Sequence[Sequence[Any]],
        gather: Gather,
        progress: Progress | None = None,
        before: Sequence[list[Any]] | None = None,
        *,
        keep: Collection[int] = (),
        free: bool = False,
    ) -> None:
        self.before = list(before or ([] for _ in given))
        self.programs, self.gather, self.progress = list(programs), gather, progress
        self.keep, self.free = keep, free
        self.values = [
            {name: one[i] for name, i in program.names.items() if one[i] is not None}
            for program, one in zip(programs, given, strict=True)
        ]
        self.kept: list[dict[int, list[Any]]] = [{} for _ in given]
        self.done: list[list[list[Any]]] = []
        """Per chunk and slice, operations that run when it has handed on what the next one takes.

        A function of several devices becomes part of the step's graph: what waits for the call
        would wait for nothing.
        """
        self.reduced: list[Sequence[Any]] = []

    def run(self) -> list[dict[int, list[Any]]]:
        """Per slice and number of a flat result, its parts."""
        found = [self._known(s) for s in range(len(self.values))]
        for number in range(len(self.programs[0].chunks)):
            gathered = self._gathered(number)
            self.done.append([self._call(number, s, one) for s, one in enumerate(gathered)])
            for program, values, results in zip(self.programs, self.values, found):
                gives = set(program.chunks[number].gives)
                numbered = enumerate(program.stitcher.program.results)
                results.update((i, values[r]) for i, r in numbered if r in gives)
            self.reduced.append(self.progress(found) if self.progress is not None else ())
        return found

    def _known(self, s: int) -> dict[int, list[Any]]:
        """Results that are inputs, or known constants."""
        program, found = self.programs[s], {}
        stitcher = program.stitcher
        for i, reference in enumerate(stitcher.program.results):
            if reference in self.values[s]:
                found[i] = self.values[s][reference]
            elif node_of(reference) in stitcher.folded:
                known = stitcher.values[node_of(reference)]
                found[i] = []
                for device, value in zip(program.devices[s], known, strict=True):
                    with tf.device(device):
                        found[i].append(tf.constant(value))
        return found

    def _gathered(self, number: int) -> list[dict[int, list[Any]]]:
        """Per slice, the parameters that are gathered for a chunk."""
        wanted = dict.fromkeys(i for one in self.programs for i in one.fetched[number])
        missing = [i for i in wanted if i not in self.kept[0]]
        last = number - 1 - IN_FLIGHT
        gates = self.done[last] if last >= 0 else self.before
        fresh = self.gather(missing, gates) if missing else [{} for _ in self.values]
        found = [{**kept, **new} for kept, new in zip(self.kept, fresh)]
        self.kept = [{i: one[i] for i in one if i in self.keep} for one in found]
        return found

    def _call(self, number: int, s: int, gathered: dict[int, list[Any]]) -> list[Any]:
        """Runs a chunk on a slice; returns what `done` has of it."""
        program, before = self.programs[s], self.done[-1][s] if self.done else []
        if not program.chunks[number].nodes:
            return before
        function = program.function(number, s)
        named = {name: gathered[i] for name, i in program.names.items() if i in gathered}
        values = {**self.values[s], **named}
        last = number - 1 - IN_FLIGHT
        waits = list(self.reduced[last]) if self.free and last >= 0 else []
        if tf.executing_eagerly():
            waits, before = [], []
        if function.size > 1 and waits:
            values.update(self._after(waits, number, s))
        if function.has_effects:
            waits += before
        inputs = [[values[r][k] for r in function.chunk.takes] for k in range(function.size)]
        one_each = [devices[0] for devices in program.devices if len(devices) == 1]
        ordered = tf.control_dependencies(waits) if waits else contextlib.nullcontext()
        with tf.device(program.devices[s][0]), ordered, instantiated_cheaply(one_each or [""]):
            operation, parts = function(inputs)
        for i, reference in enumerate(function.chunk.gives):
            self.values[s][reference] = [mine[i] for mine in parts]
        if operation is None:  # executing eagerly, in the order of these calls
            return []
        return [operation] if function.size == 1 else self._copies(self._handed_on(number, s), s)

    def _after(self, waits: Sequence[Any], number: int, s: int) -> dict[str, list[Any]]:
        """What a chunk takes from the one before, once some operations have run."""
        taken = self._handed_on(number - 1, s)
        with tf.control_dependencies(waits):
            copies = iter(self._copies(taken, s))
        return {r: [next(copies).outputs[0] for _ in self.values[s][r]] for r in taken}

    def _handed_on(self, number: int, s: int) -> list[str]:
        """References of what the chunk after takes from a chunk; of its results, if nothing."""
        chunks = self.programs[s].chunks
        after = set(chunks[number + 1].takes) if number + 1 < len(chunks) else set()
        gives = chunks[number].gives
        return [reference for reference in gives if reference in after] or list(gives[:1])

    def _copies(self, references: Sequence[str], s: int) -> list[Any]:
        """Operations that copy tensors where they are."""
        found = []
        for reference in references:
            for device, part in zip(self.programs[s].devices[s], self.values[s][reference]):
                with tf.device(device):
                    found.append(tf.identity(part).op)
        return found
