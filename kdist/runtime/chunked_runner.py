"""Plain devices, chunk by chunk: from level 2 on, and for overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program
from kdist.graphs.flat_function import FlatFunction, Traced, flat
from kdist.program.batch import SplitBatch
from kdist.program.program import Program
from kdist.program.state import carried_for
from kdist.runtime.chunk_run import ChunkedProgram
from kdist.runtime.chunking import Chunking, Chunks, Completion, Keys
from kdist.runtime.plain_runner import Begin, Collected, PlainRunner
from kdist.sharding.mesh import Topology
from kdist.storage.variables import Stored

import tensorflow as tf


class ChunkedRunner(PlainRunner):
    """Runs a model's programs on one device per slice, chunk by chunk.

    Args:
        program: The pure functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        chunking: How they are cut.
        keys: Which parameters share a bucket.
        jit_compile: Compile each chunk with XLA.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Stored],
        topology: Topology,
        chunking: Chunking,
        keys: Keys,
        *,
        jit_compile: bool = False,
    ) -> None:
        super().__init__(program, entries, topology, jit_compile=jit_compile)
        devices = [[device] for device in self.devices]
        self.chunks = Chunks(chunking, entries, topology, devices, keys, jit_compile=jit_compile)

    def _function(self, fn: Callable, jit_compile: bool, seeds: int = 0) -> Any:
        """See `PlainRunner._function`; here it is traced, cut and run by `_on_all`."""
        return FlatFunction(fn, seeds)

    def _inputs(self, replica: int) -> tuple[list[Any], list[Any]]:
        """See `PlainRunner._inputs`; of parameters that chunks gather, only what they are like."""
        params = []
        for i, entry in enumerate(self.entries):
            one = entry.variable
            there = None if i in self.chunks.gathered else entry.whole_at(replica)
            params.append(tf.TensorSpec(one.shape, one.dtype) if there is None else there)
        return params, carried_for(self.program.state, replica)

    def collect(self, batch: SplitBatch, training: bool) -> Collected:
        """See `PlainRunner.collect`; the loss gets the first slice's parameters whole."""
        found = super().collect(batch, training)
        with tf.device(self.devices[0]):
            return dataclasses.replace(found, given=super()._inputs(0))

    def _needs_counts(
        self, function: Any, inputs: tuple, batch: SplitBatch, training: bool, values: tuple
    ) -> bool:
        if len(batch.parts) == 1 or not self.program.kinds:
            return False
        function.trace([(*inputs, part, *values) for part in batch.parts])
        return self.program.traced(training).counts_by_data(batch.parts[0][2])

    def _on_all(
        self, function: Any, arguments: Sequence[tuple], begin: Begin | None = None
    ) -> list[Any]:
        traced = function.trace(arguments)
        program = self._chunked(function, traced, arguments[0])
        given = [self._given(traced, one) for one in arguments]
        programs = [program] * len(given)
        results = self.chunks.run(programs, given, self._completion(traced, begin))
        return [
            tf.nest.map_structure(
                lambda leaf, one=one: leaf.value({i: parts[0] for i, parts in one.items()}),
                traced.structure,
            )
            for one in results
        ]

    def _chunked(self, function: Any, traced: Traced, arguments: tuple) -> ChunkedProgram:
        def make() -> tuple[Any, Stitcher]:
            program = as_program(traced.concrete)
            return program, Stitcher(program)

        end = len(flat(arguments))
        start = len(flat(arguments[: len(arguments) - function.seeds]))
        return self.chunks.program(traced.concrete, traced.concrete, make, range(start, end))

    @staticmethod
    def _given(traced: Traced, arguments: tuple) -> list[Any]:
        """Flat inputs of a slice, each in one part; None for what is gathered."""
        tensors = [*flat(arguments), *traced.concrete.captured_inputs]
        return [None if isinstance(t, tf.TensorSpec) else [t] for t in tensors]

    def _completion(self, traced: Traced, begin: Begin | None) -> Completion | None:
        """Hands gradients to the update as they become complete."""
        if begin is None:
            return None
        known = self.program.trained
        gradients = traced.structure
        if isinstance(gradients, dict):
            gradients = gradients["gradients"]
        leaves = dict(zip(known.connected, gradients, strict=True))
        found: dict[int, dict[int, Any]] = {s: {} for s in range(len(self.devices))}
        reduction = begin(self._source(found), known.connected)

        def fill(variable: int, results: list[dict[int, list[Any]]]) -> None:
            for s, one in enumerate(results):
                parts = {i: one[i][0] for i in leaves[variable].numbers}
                found[s][variable] = [leaves[variable].value(parts)]

        numbers = {v: leaf.numbers for v, leaf in leaves.items()}
        return Completion(numbers, fill, reduction.advance)
