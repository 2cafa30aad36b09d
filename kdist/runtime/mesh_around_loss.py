"""Programs over the inner axes around a loss over the whole batch, which comes between passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from kdist.dtensor.call import Lowered, packed
from kdist.dtensor.sharded import Sharded
from kdist.dtensor.signatures import signature
from kdist.pipeline.instructions import Backward
from kdist.program.batch import SplitBatch
from kdist.program.recorded import made_by
from kdist.program.state import carried_for
from kdist.program.step_result import SliceResult
from kdist.runtime.chunk_run import ChunkedProgram, ChunkRun
from kdist.runtime.mesh_runner import MeshRunner, flat_numbers
from kdist.runtime.runner_contract import Begin, Collected, Coming

import tensorflow as tf
from tensorflow.experimental import dtensor


class MeshAroundLoss(MeshRunner):
    """A `MeshRunner` whose chunks are of one pass each; see `ChunkedRunner.record`."""

    by_tape = False
    """See `PlainRunner.by_tape`."""

    @functools.cached_property
    def _both(self) -> Lowered:
        return self._make(self.programs.both_passes, outlined=not self.program.blocks)

    @functools.cached_property
    def _collects(self) -> dict[bool, Lowered]:
        """By whether they are in training, forward passes without a loss."""

        def make(training: bool) -> Lowered:
            return self._make(functools.partial(self.programs.collect, training=training))

        return {training: make(training) for training in (True, False)}

    @property
    def _trained(self) -> Lowered:
        return self._both

    def collect(self, batch: SplitBatch, training: bool) -> Collected:
        """See `PlainRunner.collect`."""
        state, data = self._taken(batch, training)
        inputs = [(*one, x) for one, x in zip(state, data, strict=True)]
        found = self._on_all(self._collects[training], data, inputs, training)
        results = [self._collected(one, s, training) for s, one in enumerate(found)]
        return Collected(results, results, batch, self._given_to_loss(), found)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """See `PlainRunner.aside`."""
        assert self.chunks is not None
        return self.chunks.aside()

    def coming(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
    ) -> Coming:
        """See `PlainRunner.coming`: tensors that are whole on every device."""
        made = [made_by(found) for found in collected.back]
        return Coming.of(made, cotangents, added, self._described)

    def _described(self, made: Sharded, gradient: Any) -> Sharded:
        spec = tf.TensorSpec(made.shape, gradient.dtype)
        layout = dtensor.Layout.replicated(self.mesh, made.shape.rank)
        return Sharded((spec,) * self.mesh.size, layout, made.examples)

    def record(self, batch: SplitBatch, coming: Coming | None) -> Collected:
        """See `PlainRunner.record`: the chunks of the forward pass."""
        assert coming is not None and self.chunks is not None
        state, data = self._taken(batch, training=True)
        seeds = [(list(c), list(a)) for c, a in zip(coming.cotangents, coming.added, strict=True)]
        inputs = [(*one, x, *come) for one, x, come in zip(state, data, seeds, strict=True)]
        keys = [signature(one) for one in zip(data, seeds, strict=True)]
        count = sum(t is not None for t in tf.nest.flatten(seeds[0]))
        programs, given = self._in_chunks(self._both, keys, inputs, True, count, apart=True)
        numbers = flat_numbers(self._gradient_structure(programs))
        run = self.chunks.begin(programs, given, numbers)
        results = []
        for s, (one, found) in enumerate(zip(programs, run.run(until=Backward), strict=True)):
            program = one.stitcher.program
            forward = {n: leaf for n, leaf in program.structure.items() if n != "gradients"}
            results.append(self._collected(packed(program, found, forward), s, training=True))
        end = sum(t is not None for t in tf.nest.flatten(inputs[0]))
        back = _Back(run, programs, range(end - count, end), [len(one) for one in given])
        return Collected(results, results, batch, self._given_to_loss(), back)

    def pull_back(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        begin: Begin | None = None,
    ) -> list[list[Any]]:
        """See `PlainRunner.pull_back`: the chunks of the backward pass."""
        assert self.chunks is not None
        back: _Back = collected.back
        given = zip(cotangents, added, strict=True)
        seeds = [[t for t in (*c, *a) if t is not None] for c, a in given]
        back.run.take([back.inputs(s, one, self.mesh.size) for s, one in enumerate(seeds)])
        found = self.chunks.end(back.run, self._completion(back.programs, begin))
        gradients = []
        for program, one in zip(back.programs, found, strict=True):
            of_program = program.stitcher.program
            parts = packed(of_program, one, {"gradients": of_program.structure["gradients"]})
            gradients.append(self._parts_of(parts["gradients"]))
        return gradients

    def _taken(self, batch: SplitBatch, training: bool) -> tuple[list[Any], list[Any]]:
        """Per slice, parameters and state, and the inputs of the model."""
        self.program.tables.fetch(batch, training)
        slices = range(len(batch.parts))
        return [self._state_of(s) for s in slices], [self.inputs.data(p[0]) for p in batch.parts]

    def _collected(self, found: dict[str, Any], s: int, training: bool) -> SliceResult:
        """What a slice's forward pass gave, whole on its first device."""
        whole = {name: self._whole(found[name], s) for name in ("outputs", "masks", "added")}
        return SliceResult(updated=self._updated_whole(found["updated"], s, training), **whole)

    def _given_to_loss(self) -> tuple[list[Any], list[Any]]:
        """See `Collected.given`."""
        with tf.device(self.devices[0]):
            params = [entry.whole_at(0) for entry in self.entries]
            return params, carried_for(self.program.state, 0)


@dataclasses.dataclass(frozen=True)
class _Back:
    """What a backward pass needs of the forward pass before it.

    Attributes:
        run: Both passes, of which the first is written.
        programs: Of each slice.
        seeds: Positions of the flat inputs that the backward pass begins with.
        counts: Per slice, how many flat inputs there are.
    """

    run: ChunkRun
    programs: Sequence[ChunkedProgram]
    seeds: range
    counts: Sequence[int]

    def inputs(self, s: int, seeds: Sequence[Any], devices: int) -> list[Any]:
        """Flat inputs of a slice, the same on all devices; None for those that it has."""
        found: list[Any] = [None] * self.counts[s]
        for position, tensor in zip(self.seeds, seeds, strict=True):
            found[position] = [tensor] * devices
        return found
