"""Plain devices, chunk by chunk: from level 2 on, and for overlap."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program
from kdist.graphs.flat_function import FlatFunction, Leaf, TracedFunction, flat
from kdist.pipeline.instructions import Backward
from kdist.program.batch import SplitBatch
from kdist.program.program import Program
from kdist.program.recorded import both_passes
from kdist.program.state import carried_for
from kdist.program.step_result import SliceResult
from kdist.runtime.chunk_run import ChunkedProgram, ChunkRun
from kdist.runtime.chunking import Chunking, Chunks, Completion, Keys
from kdist.runtime.plain_runner import PlainRunner
from kdist.runtime.runner_contract import Begin, Collected, Coming
from kdist.sharding.mesh import Topology
from kdist.storage.variables import Stored

import tensorflow as tf


class ChunkedRunner(PlainRunner):
    """Runs a model's programs on one device per slice, chunk by chunk.

    Args:
        program: The pure functions.
        entries: `Stored` of each of `ModelState.params`.
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
        both = self._checked(both_passes(program))
        self._both = FlatFunction(both, seeds=2, apart=True)
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
        return dataclasses.replace(found, given=self._given_to_loss())

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """See `PlainRunner.aside`."""
        return self.chunks.aside()

    def _given_to_loss(self) -> tuple[list[Any], list[Any]]:
        """See `Collected.given`."""
        with tf.device(self.devices[0]):
            return super()._inputs(0)

    def record(self, batch: SplitBatch, coming: Coming | None) -> Collected:
        """See `PlainRunner.record`: the chunks of the forward pass."""
        assert coming is not None
        self.program.tables.fetch(batch, training=True)
        every = zip(self._all_inputs(), batch.parts, coming.cotangents, coming.added, strict=True)
        arguments = [(*one, part[0], list(c), list(a)) for one, part, c, a in every]
        traced = self._trace(self._both, arguments, training=True)
        programs = [self._chunked(self._both, traced, arguments[0])] * len(arguments)
        given = [self._given(traced, one) for one in arguments]
        numbers = {v: leaf.numbers for v, leaf in self._gradient_leaves(traced).items()}
        run = self.chunks.begin(programs, given, numbers)
        forward = {name: leaf for name, leaf in traced.structure.items() if name != "gradients"}
        results = [SliceResult(**_filled(forward, one)) for one in run.run(until=Backward)]
        before = len(flat(arguments[0][: -self._both.seeds]))
        back = _Back(run, traced, before)
        return Collected(results, results, batch, self._given_to_loss(), back)

    def pull_back(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        begin: Begin | None = None,
    ) -> list[list[Any]]:
        """See `PlainRunner.pull_back`: the chunks of the backward pass."""
        back: _Back = collected.back
        seeds = [flat([*given]) for given in zip(cotangents, added, strict=True)]
        back.run.take([back.inputs(one) for one in seeds])
        found = self.chunks.end(back.run, self._completion(back.traced, begin))
        return [_filled(back.traced.structure["gradients"], one) for one in found]

    def _needs_counts(
        self, function: Any, inputs: tuple, batch: SplitBatch, training: bool, values: tuple
    ) -> bool:
        if len(batch.parts) == 1 or not self.program.kinds:
            return False
        self._trace(function, [(*inputs, part, *values) for part in batch.parts], training)
        return self.program.traced(training).counts_by_data

    def _on_all(
        self,
        function: Any,
        arguments: Sequence[tuple],
        training: bool,
        begin: Begin | None = None,
    ) -> list[Any]:
        traced = self._trace(function, arguments, training)
        program = self._chunked(function, traced, arguments[0])
        given = [self._given(traced, one) for one in arguments]
        programs = [program] * len(given)
        results = self.chunks.run(programs, given, self._completion(traced, begin))
        return [_filled(traced.structure, one) for one in results]

    def _trace(
        self, function: FlatFunction, arguments: Sequence[tuple], training: bool
    ) -> TracedFunction:
        """The trace of a function for some calls; see `TraceFacts.as_of`."""
        traced = function.trace(arguments)
        self.program.traced(training).as_of(traced.concrete)
        return traced

    def _chunked(self, function: Any, traced: TracedFunction, arguments: tuple) -> ChunkedProgram:
        def make() -> tuple[Any, Stitcher]:
            program = as_program(traced.concrete)
            return program, Stitcher(program)

        end = len(flat(arguments))
        start = len(flat(arguments[: len(arguments) - function.seeds]))
        seeds, key = range(start, end), traced.concrete
        return self.chunks.program(key, traced.concrete, make, seeds, apart=function.apart)

    @staticmethod
    def _given(traced: TracedFunction, arguments: tuple) -> list[Any]:
        """Flat inputs of a slice, each in one part; None for what is gathered."""
        tensors = [*flat(arguments), *traced.concrete.captured_inputs]
        return [None if isinstance(t, tf.TensorSpec) else [t] for t in tensors]

    def _completion(self, traced: TracedFunction, begin: Begin | None) -> Completion | None:
        """Hands gradients to the update as they become complete."""
        if begin is None:
            return None
        leaves = self._gradient_leaves(traced)
        found: dict[int, dict[int, Any]] = {s: {} for s in range(len(self.devices))}
        reduction = begin(self._source(found), [*leaves])

        def fill(variable: int, results: list[dict[int, list[Any]]]) -> None:
            for s, one in enumerate(results):
                parts = {i: one[i][0] for i in leaves[variable].numbers}
                found[s][variable] = [leaves[variable].value(parts)]

        numbers = {v: leaf.numbers for v, leaf in leaves.items()}
        return Completion(numbers, fill, reduction.advance)

    def _gradient_leaves(self, traced: TracedFunction) -> dict[int, Leaf]:
        """By trainable variable that has one, its gradient among a trace's results."""
        return dict(zip(self.program.trained.connected, traced.structure["gradients"], strict=True))


@dataclasses.dataclass(frozen=True)
class _Back:
    """What a backward pass needs of the forward pass before it.

    Attributes:
        run: Both passes, of which the first is written.
        traced: Of both.
        before: Number of flat inputs before those that the backward pass begins with.
    """

    run: ChunkRun
    traced: TracedFunction
    before: int

    def inputs(self, seeds: Sequence[Any]) -> list[Any]:
        """Flat inputs of a slice; None for those that it has."""
        after = len(self.traced.concrete.inputs) - self.before - len(seeds)
        return [*[None] * self.before, *([t] for t in seeds), *[None] * after]


def _filled(structure: Any, results: Mapping[int, list[Any]]) -> Any:
    """What a function returns, from the parts of its flat results, one each."""
    values = {i: parts[0] for i, parts in results.items()}
    return tf.nest.map_structure(lambda leaf: leaf.value(values), structure)
