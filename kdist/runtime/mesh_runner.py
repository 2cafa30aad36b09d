"""Running programs over the inner axes, in the step's graph.

Each slice's devices hold parts of every tensor (`kdist.dtensor.sharded`). A program is lowered once
(`kdist.dtensor.call`) and is nodes of the step's graph on each slice's devices, like what
`PlainRunner` runs on one device per slice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.dtensor import relayout
from kdist.dtensor.call import Lowered, packed
from kdist.dtensor.inputs import SliceInputs
from kdist.dtensor.lowered import Collective
from kdist.dtensor.lowered_program import Island
from kdist.dtensor.model_layouts import ModelLayouts
from kdist.dtensor.program_layouts import MeshPrograms
from kdist.dtensor.sharded import Sharded, replicate
from kdist.dtensor.signatures import signature
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.program.batch import SplitBatch, for_each_term
from kdist.program.loss import shares_from_counts
from kdist.program.program import Program
from kdist.program.step_result import SliceResult
from kdist.runtime.chunk_run import ChunkedProgram
from kdist.runtime.chunking import Chunking, Chunks, Completion, Keys
from kdist.runtime.runner_contract import Begin, loss_factor, row_shares
from kdist.storage.fetched_table import taking_any_ids
from kdist.storage.parts import whole_of
from kdist.storage.variables import Stored

import keras
import tensorflow as tf

WHOLE_RESULTS = ("loss", "terms", "loss_parts", "outputs", "masks")
"""What a step needs as whole tensors."""


class MeshRunner:
    """Runs a model's programs over the inner axes; the counterpart of `PlainRunner`.

    Args:
        program: The pure functions.
        entries: `Stored` of each of `ModelState.params`.
        layouts: The model's resolved layouts, on the mesh as programs see it and as weights are
            stored on it.
        alltoall: Whether re-layouts may use all-to-all.
        want_outputs: Whether training and test steps must return the model's outputs.
        want_parts: Whether they must return every part of the loss.
        chunking: How programs are cut into chunks, if they are.
        keys: Which parameters share a bucket.
        jit_compile: See `Stitcher.stitch`.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Stored],
        layouts: ModelLayouts,
        *,
        alltoall: bool,
        jit_compile: bool = False,
        want_outputs: bool,
        want_parts: bool,
        chunking: Chunking | None = None,
        keys: Keys = lambda: (),
    ) -> None:
        self.program = program
        self.entries = list(entries)
        self.topology, storage = layouts.compute, layouts.topology
        self.mesh = relayout.make_mesh(self.topology)
        self.inputs = SliceInputs(
            program.state, entries, self.topology, self.mesh, storage, layouts.tell_uncut
        )
        self.programs = MeshPrograms(program, entries, storage, layouts, want_outputs, want_parts)
        paths = [
            layer.path or layer.name for layer in layouts.model_layers if layer is not program.model
        ]

        self.chunks: Chunks | None = None
        if chunking is not None:
            devices = [one.devices for one in self.topology.slices]
            self.chunks = Chunks(
                chunking,
                entries,
                storage,
                devices,
                keys,
                places=self.inputs.places,
                jit_compile=jit_compile,
            )

        def make(function: Callable, outlined: bool = True) -> Lowered:
            return Lowered(
                function,
                layouts,
                self.mesh,
                alltoall,
                paths,
                jit_compile=jit_compile,
                outlined=outlined,
            )

        self._make = make
        self._gradients = make(self.programs.gradients, outlined=not program.blocks)
        self._losses = make(self.programs.losses)
        self._counts = {
            training: make(functools.partial(self.programs.counts, training=training))
            for training in (True, False)
        }
        self._outputs = make(self.programs.outputs)
        self._probe = make(self.programs.probe)

    @property
    def _trained(self) -> Lowered:
        """The training program."""
        return self._gradients

    @property
    def devices(self) -> list[str]:
        """The device on which each slice's outputs arrive."""
        return [one.devices[0] for one in self.topology.slices]

    def gradients(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> list[SliceResult]:
        """Loss and gradients of every slice, gradients as per-device lists; see `PlainRunner`."""
        return self._run(self._gradients, batch, True, (loss_factor(scale),), begin)

    def losses(self, batch: SplitBatch) -> list[SliceResult]:
        """Loss and outputs of every slice, in inference mode."""
        return self._run(self._losses, batch, False, ())

    def outputs(self, batch: SplitBatch) -> list[SliceResult]:
        """See `PlainRunner.outputs`."""
        self.program.tables.fetch(batch, training=False)
        data = [self.inputs.data(part[0]) for part in batch.parts]
        inputs = [(*self._state_of(s), x) for s, x in enumerate(data)]
        results = []
        for s, found in enumerate(self._on_all(self._outputs, data, inputs, training=False)):
            outputs = self._whole(found["outputs"], s)
            updated = self._updated_whole(found["updated"], s, False)
            results.append(SliceResult(outputs=outputs, updated=updated))
        return results

    def _run(
        self,
        program: Lowered,
        batch: SplitBatch,
        training: bool,
        extra: tuple,
        begin: Begin | None = None,
    ) -> list[SliceResult]:
        self.program.tables.fetch(batch, training)
        state = [self._state_of(s) for s in range(len(batch.parts))]
        parts = [self.inputs.data(part) for part in batch.parts]
        rows = row_shares(batch)
        shares = self._shares(program, state, parts, batch, rows, training)
        inputs = []
        for s, one in enumerate(parts):
            first = tf.constant(float(s == 0), tf.float64)
            numbers = [replicate(t, self.mesh) for t in (shares[s], rows[s], first, *extra)]
            inputs.append((*state[s], one, *numbers))
        found = self._on_all(program, parts, inputs, training, begin)
        return [self._read(one, s, training) for s, one in enumerate(found)]

    def _state_of(self, s: int) -> tuple[list[Sharded], list[Sharded]]:
        """Parameters and carried state of slice `s`; what chunks gather is not read here."""
        gathered = set() if self.chunks is None else self.chunks.gathered
        return self.inputs.state_of(s, gathered)

    def _on_all(
        self,
        program: Lowered,
        data: Sequence[Any],
        inputs: Sequence[Any],
        training: bool,
        begin: Begin | None = None,
    ) -> list[Any]:
        """Calls a program on every slice.

        Args:
            program: The program.
            data: Per slice, the inputs on whose shapes a trace depends.
            inputs: Per slice, all inputs.
            training: Whether in training.
            begin: See `PlainRunner.gradients`.
        """
        keys = [signature(one) for one in data]
        if self.chunks is None:
            results = []
            for s, (key, one) in enumerate(zip(keys, inputs, strict=True)):
                results.append(program(s, key, one))
                self._as_of(program, key, one, training)
            return results
        # Everything in the backward pass depends on what the loss is multiplied by.
        seeds = int(begin is not None)
        programs, given = self._in_chunks(program, keys, inputs, training, seeds)
        results = self.chunks.run(programs, given, self._completion(programs, begin))
        return [
            packed(one.stitcher.program, found)
            for one, found in zip(programs, results, strict=True)
        ]

    def _in_chunks(
        self,
        program: Lowered,
        keys: Sequence[Any],
        inputs: Sequence[Any],
        training: bool,
        seeds: int,
        *,
        apart: bool = False,
    ) -> tuple[list[ChunkedProgram], list[list[Any]]]:
        """A program in chunks, and its flat inputs, None for what is not there yet; per slice.

        Args:
            program: The program.
            keys: Signatures of what a trace depends on, per slice.
            inputs: Per slice.
            training: Whether in training.
            seeds: How many of the last flat inputs everything in the backward pass depends on.
            apart: Whether these are known only after the forward pass.
        """
        assert self.chunks is not None
        lowered = program.lower_all(keys, inputs)
        programs, given = [], []
        for (key, flat), name, one in zip(lowered, keys, inputs, strict=True):
            end = sum(t is not None for t in tf.nest.flatten(one))
            stitcher, traced = program.stitchers[key], self._as_of(program, name, one, training)
            programs.append(
                self.chunks.program(
                    (stitcher, key),
                    traced,
                    lambda stitcher=stitcher: (stitcher.program, stitcher),  # type: ignore[misc]
                    range(end - seeds, end),
                    apart=apart,
                )
            )
            known = [not isinstance(t.parts[0], tf.TensorSpec) for t in flat]
            given.append([list(t.parts) if there else None for t, there in zip(flat, known)])
        return programs, given

    def _as_of(self, program: Lowered, key: Any, inputs: Any, training: bool) -> Any:
        """The trace for such inputs; see `Traced.as_of`. Lowering may have made a new one."""
        traced = program.trace(key, inputs)
        self.program.traced(training).as_of(traced)
        return traced

    def _completion(
        self, programs: Sequence[ChunkedProgram], begin: Begin | None
    ) -> Completion | None:
        """Hands gradients to the update as they become complete."""
        if begin is None:
            return None
        structure = self._gradient_structure(programs)
        found: dict[int, dict[int, Any]] = {s: {} for s in range(len(programs))}
        reduction = begin(self._source(found), [*structure])

        def fill(variable: int, results: list[dict[int, list[Any]]]) -> None:
            for s, one in enumerate(results):
                position = structure[variable]
                if isinstance(position, tuple | list):
                    found[s][variable] = list(zip(*(one[i] for i in position)))
                else:
                    found[s][variable] = one[position]

        return Completion(flat_numbers(structure), fill, reduction.advance)

    def _gradient_structure(self, programs: Sequence[ChunkedProgram]) -> dict[int, Any]:
        """By trainable variable with a gradient, which flat results this consists of."""
        structure = programs[0].stitcher.program.structure["gradients"]
        return dict(zip(self.program.trained.connected, structure, strict=True))

    def _shares(
        self,
        program: Lowered,
        state: Any,
        parts: Any,
        batch: SplitBatch,
        rows: Sequence[Any],
        training: bool,
    ) -> list[Any]:
        """Each slice's share of every loss term; see `kdist.program.loss`."""
        shares = [for_each_term(row, len(self.program.kinds)) for row in rows]
        if len(parts) == 1 or not self.program.kinds:
            return shares
        numbers = [shares[0], rows[0], rows[0], *([tf.constant(1.0)] if training else [])]
        given = [replicate(t, self.mesh) for t in numbers]
        self._as_of(program, signature(parts[0]), (*state[0], parts[0], *given), training)
        if not self.program.traced(training).counts_by_data:
            return shares
        rows_of = [replicate(count, self.mesh) for count in batch.counts]
        inputs = [(*own, one, n) for own, one, n in zip(state, parts, rows_of, strict=True)]
        counts = self._on_all(self._counts[training], parts, inputs, training)
        return shares_from_counts([self._whole(count, s) for s, count in enumerate(counts)])

    def _whole(self, tensors: Any, s: int) -> Any:
        """Tensors of slice `s`, whole on its first device; None stays None."""
        return keras.tree.map_structure(
            lambda t: None if t is None else t.whole(self.devices[s]), tensors
        )

    def _read(self, result: dict[str, Any], s: int, training: bool) -> SliceResult:
        """Results as a step takes them: gradients as lists of parts, the rest whole."""
        gradients = self._parts_of(result.get("gradients", []))
        updated = self._updated_whole(result["updated"], s, training)
        whole = {name: self._whole(result[name], s) for name in WHOLE_RESULTS}
        return SliceResult(gradients=gradients, updated=updated, **whole)

    @staticmethod
    def _parts_of(gradients: Sequence[Any]) -> list[list[Any]]:
        """Gradients, or values and indices of rows, as lists of parts."""
        return [
            list(zip(*(t.parts for t in g))) if isinstance(g, tuple) else list(g.parts)
            for g in gradients
        ]

    def recorded(self) -> Sequence[Collective]:
        """Collectives of the lowered training program, or of what stands for it.

        Those that run again are listed again.
        """
        return self._with_copies(self._trained.recorded or self._probe.recorded)

    def recorded_by_rows(self) -> dict[int, list[Collective]]:
        """The same of a slice's part of a batch, by its rows, for all sizes that are known."""
        found = self._trained.by_rows or self._probe.by_rows
        return {rows: self._with_copies(one) for rows, one in found.items()}

    def _with_copies(self, found: Sequence[Collective]) -> list[Collective]:
        again = self.chunks.again if self.chunks is not None else {}
        copies = [
            dataclasses.replace(one, phase="backward" if backward else one.phase)
            for one in found
            for backward in (False, True)
            for _ in range(again.get((one.node, backward), 0))
        ]
        return [*found, *copies]

    def islands(self) -> Sequence[Island]:
        """What of that program runs on whole operands."""
        return self._trained.islands or self._probe.islands

    def lower_without_loss(self, x: Any) -> None:
        """Lowers a forward and backward pass, to see its collectives."""
        with taking_any_ids():
            self.program.tables.fetch_micro_batches([[(x, None, None)]], training=True)
        data = self.inputs.data(x)
        self._probe.lower(signature(data), (*self.inputs.described_state(), data))

    def gathered_paths(self) -> list[str]:
        """Weights that are gathered before use because an operation cannot take such parts."""
        state = self.program.state
        params = [state.params[i].path for i in sorted(self.programs.gathered_params)]
        return params + [state.carried[i].path for i in sorted(self.programs.gathered_carried)]

    def gradient_at(
        self, results: Sequence[Sequence[Any]], once: Mapping[int, Any]
    ) -> SliceGradients:
        """How the update reads gradients; see `PlainRunner.gradient_at`."""
        connected = self.program.trained.connected
        found = {s: dict(zip(connected, one)) for s, one in enumerate(results)}
        return self._source(found).joined(once)

    def _source(self, gradients: Mapping[int, Mapping[int, Sequence[Any]]]) -> SliceGradients:
        storage = self.inputs.storage
        places = storage.places_in(self.topology)
        rows = self.program.trained.rows
        devices = [one.devices for one in storage.slices]
        return SliceGradients(gradients, rows, self.entries, devices, places)

    def _updated_whole(self, updated: Sequence[Sharded], s: int, training: bool) -> list[Any]:
        """New state of slice `s` as whole tensors."""
        placements = {i: entry.placement for i, entry in enumerate(self.inputs.fixed)}
        after = len(self.program.state.carried)
        placements |= {after + i: entry.placement for i, entry in enumerate(self.entries)}
        # Of those that hold the same, the first.
        number = {k: n for n, (_, k) in reversed([*enumerate(self.inputs.places[s])])}
        return [
            whole_of(placements[i], lambda k, one=one: one.parts[number[k]])  # type: ignore[misc]
            if i in placements
            else one.parts[0]
            for i, one in zip(self.program.traced(training).updated, updated)
        ]


def flat_numbers(structure: Mapping[int, Any]) -> dict[int, list[int]]:
    """See `Completion.numbers`."""
    return {v: tf.nest.flatten(positions) for v, positions in structure.items()}
