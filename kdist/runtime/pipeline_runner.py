"""Runs a pipeline in the graph of a step.

The schedule is data; this reads it. An instruction calls a function of its virtual stage on the
stage's slice; calls of one stage are chained in the schedule's order (`kdist.runtime.order`).
Everything else is edges of the graph: boundary tensors go to the next stage's devices, their
gradients back, gradients add up where the parameters are.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from kdist.dtensor.lowered import Collective
from kdist.dtensor.lowered_program import Island
from kdist.dtensor.retraced import Settled
from kdist.optimizer.gather import Gatherer, gather_groups
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.pipeline.check_work import check_work
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.work import Work, work_of
from kdist.program.batch import SplitBatch, split
from kdist.program.recorded import with_their_logits
from kdist.program.step_result import SliceResult
from kdist.program.vjp import differentiable
from kdist.runtime.chunking import Chunking, Keys
from kdist.runtime.flow import Flow
from kdist.runtime.inner_axes import islands_of
from kdist.runtime.micro_batches import MicroBatches
from kdist.runtime.one_device import value_at
from kdist.runtime.order import execution_order, forward_only, forwards_first
from kdist.runtime.pipeline_run import PipelineRun
from kdist.runtime.plain_runner import PlainRunner
from kdist.runtime.recorder import TimelineRecorder
from kdist.runtime.runner_contract import Begin, Collected, Coming, loss_factor
from kdist.runtime.stage_backend import StageBackend
from kdist.sharding.mesh import Topology
from kdist.stages.functions import Pass, StageFunctions, Unused
from kdist.stages.leaves import general
from kdist.stages.pipeline_program import PipelineProgram
from kdist.stages.stage_programs import StagePrograms
from kdist.storage.fetched_table import taking_any_ids
from kdist.storage.variables import Stored

import keras
import tensorflow as tf

NOTHING_UNUSED = Unused()


class PipelineRunner:
    """Runs a model's stages.

    Args:
        program: What the stages share.
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh.
        backend: What a stage runs on: `OneDevice` or `InnerAxes`.
        recorder: Gives what records when training steps ran what, if they are to be recorded.
        want_outputs: Whether training and test steps must return the model's outputs.
        want_parts: Whether they must return every part of the loss.
        chunking: Whether a stage keeps what it gathers until the step ends, and waits for gradients
            to be summed.
        keys: Which parameters share a bucket.

    Attributes:
        gathered: Positions of the trainable variables that stages gather before use.
        work: What the stages do in the training step that was traced last; None before.
    """

    by_tape = False
    """See `PlainRunner.by_tape`: stages make functions of what gets a gradient."""

    def __init__(
        self,
        program: PipelineProgram,
        entries: Sequence[Stored],
        topology: Topology,
        backend: StageBackend,
        recorder: Callable[[], TimelineRecorder | None] = lambda: None,
        *,
        want_outputs: bool,
        want_parts: bool,
        chunking: Chunking,
        keys: Keys,
    ) -> None:
        self.program, self.entries, self.topology = program, list(entries), topology
        self.backend, self.recorder = backend, recorder
        self.want_outputs, self.want_parts = want_outputs, want_parts
        self.staged = program.staged
        self.schedule = program.staged.schedule
        self.programs = StagePrograms(program, backend)
        self.chunking, self.keys = chunking, keys
        self.gathered = {i for i, e in enumerate(entries) if e.placement.gathered}
        self.work: Work | None = None

    @property
    def devices(self) -> list[str]:
        """The device on which each replica's outputs are: its last stage's."""
        last = self.staged.stage_of(self.schedule.virtual_stages - 1)
        return [self.topology.slices[s].devices[0] for s in self.topology.group(last)]

    def gradients(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> list[SliceResult]:
        """Loss and gradients of every replica; see `Program.loss_and_gradients`."""
        split, outputs = self.schedule.splits_backward, self.want_outputs
        wanted = Pass(training=True, differentiate=True, split=split, outputs=outputs)
        run = self._passed(wanted, self.schedule, batch, loss_factor(scale), with_loss=True)
        results = [flow.result(self.want_outputs, self.want_parts) for flow in run.flows]
        self._reduce(run, begin, [one.gradients for one in results])
        return results

    def _reduce(self, run: PipelineRun, begin: Begin | None, gradients: Sequence[Any]) -> None:
        """Has the gradients summed as their stages complete them."""
        connected = self.program.trained.connected
        if begin is not None and connected:
            run.reduce(begin, self.gradient_at(gradients, {}), connected)

    def losses(self, batch: SplitBatch) -> list[SliceResult]:
        """Loss and outputs of every replica, in inference mode."""
        schedule = forward_only(self.schedule)
        run = self._passed(Pass(training=False), schedule, batch, None, with_loss=True)
        return [flow.result(self.want_outputs, self.want_parts) for flow in run.flows]

    def outputs(self, batch: SplitBatch) -> list[SliceResult]:
        """See `PlainRunner.outputs`, per replica."""
        schedule = forward_only(self.schedule)
        run = self._passed(Pass(training=False), schedule, batch, None, with_loss=False)
        return [flow.result(True, False) for flow in run.flows]

    coming = staticmethod(PlainRunner.coming)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """See `PlainRunner.aside`."""
        return contextlib.nullcontext()

    def record(self, batch: SplitBatch, coming: Coming | None) -> Collected:
        """See `PlainRunner.record`."""
        assert coming is not None
        added, outputs = map(_without_gradient, (coming.added, coming.cotangents))
        return self.collect(batch, training=True, unused=Unused(added, outputs))

    def collect(
        self, batch: SplitBatch, training: bool, unused: Unused = NOTHING_UNUSED
    ) -> Collected:
        """See `PlainRunner.collect`: all forwards, of every replica and micro-batch.

        Args:
            batch: The batch.
            training: Whether it is in training.
            unused: What the loss does not follow from.
        """
        schedule = self.schedule if training else forward_only(self.schedule)
        split = schedule.splits_backward
        wanted = Pass(training, differentiate=training, split=split, whole=True, unused=unused)
        with self.programs.forgetting():
            run = self._begun(wanted, schedule, batch, None, with_loss=False)
            run.forwards()
        results = [flow.result(self.want_outputs, False) for flow in run.flows]
        micro = run.micro
        every = [part for row in micro.parts for part in row]
        counts = [count for row in micro.counts for count in row]
        parts = [flow.collected(i) for flow in run.flows for i in range(len(flow.parts))]
        state = self.program.state
        with tf.device(self.devices[0]):
            params = [value_at(state, v, self.topology, 0) for v in state.params]
            carried = [value_at(state, v, self.topology, 0) for v in state.carried]
        cut = dataclasses.replace(batch, parts=every, counts=counts, full=micro.full)
        return Collected(results, parts, cut, (params, carried), run)

    def pull_back(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        begin: Begin | None = None,
    ) -> list[Any]:
        """See `PlainRunner.pull_back`: all backwards of what `record` ran forward."""
        run, given = collected.back, iter(zip(cotangents, added, strict=True))
        for flow in run.flows:
            for i in range(len(flow.parts)):
                flow.give_cotangents(i, *next(given))
        with self.programs.forgetting():
            run.rest()
            self.programs.settle()
        gradients = [flow.summed() for flow in run.flows]
        self._reduce(run, begin, gradients)
        return gradients

    def _passed(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> PipelineRun:
        """A pass, once everything is written into the graph of the step."""
        with self.programs.forgetting():
            run = self._begun(wanted, schedule, batch, scale, with_loss)
            run.all()
            self.programs.settle()
            return run

    def micro_batches(self, batch: SplitBatch) -> MicroBatches:
        """A batch as the stages take it."""
        return MicroBatches.of(batch, self.schedule.micro_batches, static=self.backend.exact)

    def _begun(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> PipelineRun:
        """A pass of which nothing is written yet."""
        exact = self.backend.exact
        micro = self.micro_batches(batch)
        named = [[(self.program.inputs_by_name(x), y, w) for x, y, w in row] for row in micro.parts]
        terms = len(self.program.kinds) if with_loss else None
        every = general([part for row in named for part in row])
        self.program.tables.fetch_micro_batches(micro.parts, wanted.training)
        functions = [
            [
                self.programs.functions(wanted, part, terms, (r, i))
                if exact
                else self.programs.functions(wanted, every, terms)
                for i, part in enumerate(row)
            ]
            for r, row in enumerate(named)
        ]
        shares: list[Any] = [None] * len(named)
        if terms is not None:
            shares = micro.term_shares(self._counted(micro, wanted, terms), terms)
        flows = [
            Flow(self, r, functions[r], micro, named[r], shares[r], scale)
            for r in range(self.topology.data_size)
        ]
        recorder = self.recorder() if wanted.differentiate else None
        if recorder is not None:
            recorder.begin(schedule)
        order = execution_order(schedule, self._written(functions[0][0]))
        keys = self.keys()
        work = self._work(schedule, functions[0][0], with_loss, keys)
        if wanted.differentiate:
            self.work = work
        storage = self.backend.storage
        devices = self.backend.storage_devices
        gatherer = Gatherer(self.entries, storage, devices, keys)
        return PipelineRun(work, order, micro, flows, gatherer, recorder)

    def _work(
        self,
        schedule: Schedule,
        functions: Sequence[StageFunctions],
        with_loss: bool,
        keys: Sequence[Hashable | None],
    ) -> Work:
        """What the stages do with weights, by what their functions look at."""
        penalized: dict[int, list[int]] = {}
        for position in self.program.penalized if with_loss else ():
            users = self.staged.users().get(id(self.program.state.trainable[position]), (0,))
            penalized.setdefault(users[0], []).append(position)
        uses = [
            one.weight_use(self.gathered, penalized.get(one.body.virtual, ())) for one in functions
        ]
        written = {key for one in functions for key in one.example_output.state}
        params = self.program.state.params
        kept = {p for p in self.gathered if p in self.chunking.keep or id(params[p]) in written}
        placements = [entry.placement for entry in self.entries]
        work = work_of(
            schedule,
            uses,
            lambda weights: gather_groups(weights, keys, placements),
            kept=kept,
            free=self.chunking.free,
            early=self.chunking.early,
        )
        check_work(work, uses)
        return work

    def _written(self, functions: Sequence[Any]) -> dict[str, list[int]]:
        """State that forward passes write, with the virtual stages that use it."""
        written = {v for one in functions for v in one.example_output.state}
        users = self.staged.users()
        paths = {id(v): v.path for v in self.program.state.written}
        found: dict[str, list[int]] = {}
        for n, key in enumerate(sorted(written, key=lambda key: paths[key])):
            using = [one.body.virtual for one in functions if key in one.example_output.state]
            found[f"{paths[key]}#{n}"] = sorted({*users.get(key, ()), *using})
        return found

    def _counted(self, micro: MicroBatches, wanted: Pass, terms: int) -> list[list[Any]] | None:
        """What each micro-batch counts in each loss, None where that is its rows."""
        many = len(micro.parts) * len(micro.parts[0]) > 1
        if not (many and terms and self.program.traced(wanted.training).counts_by_data):
            return None
        example = general([part for row in micro.parts for part in row])
        function = self.program.count_function(example, wanted.training)
        used = [i for i in function.used if i < function.variables]
        tables = {table.position: table for table in self.program.tables.tables}
        if wrong := [tables[i] for i in used if i in tables and tables[i].virtuals]:
            raise ValueError(
                "Masks of the outputs decide what the loss counts, and follow from rows of a table "
                "that several stages look up, each for itself. Put the look-ups into one stage, "
                "leave the table whole on the device, or pass sample_weight. "
                f"Received: table {wrong[0].layer.embeddings.path!r}"
            )
        counted: list[list[Any]] = []
        for r, device in enumerate(self.devices):
            with tf.device(device):
                values = {i: self._value(r, i) for i in used if i not in tables}
                counted.append([])
                for i, (part, rows) in enumerate(zip(micro.parts[r], micro.counts[r])):
                    # Masks may follow from rows of a table.
                    values.update({n: tables[n].rows(r, i) for n in used if n in tables})
                    counted[-1].append(function(values.__getitem__, part, rows))
        return counted

    def _value(self, replica: int, position: int) -> Any:
        """A variable's value for the counting pass, parameters first, then carried state."""
        state = self.program.state
        variable = (*state.params, *state.carried)[position]
        return value_at(state, variable, self.topology, self.topology.slice_number(0, replica))

    def gradient_at(self, results: Sequence[Any], once: Mapping[int, Any]) -> SliceGradients:
        """How the update reads gradients; see `PlainRunner.gradient_at`."""
        found = {s: gradients for replica in results for s, gradients in replica.items()}
        return self.backend.source(found, self.program.trained.rows).joined(once)

    def recorded(self) -> list[Collective]:
        """Collectives of the lowered functions of one replica, each function once."""
        return [one for part in self._lowered().trained_parts() for one in part.recorded]

    def recorded_by_rows(self) -> dict[int, list[Collective]]:
        """The same of a micro-batch, by its rows, for all sizes that are known."""
        return {
            rows: [one for part in parts for one in part.recorded]
            for rows, parts in self._lowered().trained_by_rows().items()
        }

    def islands(self) -> list[Island]:
        """What of the stages runs on whole operands."""
        return islands_of(self._lowered().trained_parts())

    def _lowered(self) -> StagePrograms:
        """What training steps run, or what was lowered without one."""
        return self.programs if self.programs.trained_parts() else self._probe.programs

    @functools.cached_property
    def _probe(self) -> PipelineRunner:
        """What lowers stages that have not trained; no step runs its functions."""
        probe = copy.copy(self)
        probe.programs, probe.recorder = StagePrograms(self.program, self.backend), lambda: None
        probe.schedule = forwards_first(self.schedule)
        return probe

    def lower_without_loss(self, x: Any) -> None:
        """Lowers the stages' forward and backward passes, to see their collectives.

        Args:
            x: Inputs of a micro-batch.
        """
        replicas = self.topology.data_size

        def passes() -> None:
            copies = replicas * self.schedule.micro_batches
            inputs = keras.tree.map_structure(lambda t: tf.repeat(t, copies, axis=0), x)
            batch = split(inputs, None, None, replicas, static=True)
            collected = self._probe.collect(batch, training=True)
            outputs = [with_their_logits(one.outputs, one.masks) for one in collected.parts]
            added = [one.added for one in collected.parts]
            self._probe.pull_back(collected, _ones(outputs), _ones(added))

        with taking_any_ids():
            Settled(passes).get_concrete_function()

    def gathered_paths(self) -> list[str]:
        """Weights that are made whole before use because an operation cannot take parts."""
        return self.backend.gathered_paths()


def _ones(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Gradients for what can have one."""
    return [
        [tf.ones_like(v) if v is not None and differentiable(v) else None for v in one]
        for one in values
    ]


def _without_gradient(gradients: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Numbers of the columns that have none."""
    columns = enumerate(zip(*gradients, strict=True))
    return tuple(i for i, column in columns if all(one is None for one in column))
