"""Runs a pipeline in the graph of a step.

The schedule is data; this reads it. An instruction calls a function of its virtual stage on the
stage's slice; calls of one stage are chained in the schedule's order (`kdist.runtime.order`).
Everything else is edges of the graph: boundary tensors go to the next stage's devices, their
gradients back, gradients add up where the parameters are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.dtensor.call import Retrace
from kdist.dtensor.lowered import Collective
from kdist.dtensor.lowering import Island
from kdist.graphs.instantiation import instantiated_cheaply
from kdist.optimizer.gradients import GradientSource
from kdist.pipeline.instructions import Forward, Instruction
from kdist.pipeline.schedule import Schedule
from kdist.program.batch import SplitBatch
from kdist.runtime.flow import Flow
from kdist.runtime.inner_axes import islands_of
from kdist.runtime.micro_batches import MicroBatches
from kdist.runtime.one_device import value_at
from kdist.runtime.order import Chain, execution_order, forward_only
from kdist.runtime.plain_runner import Begin, Collected
from kdist.runtime.recorder import Recorder
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Placement
from kdist.stages.functions import Pass
from kdist.stages.leaves import general
from kdist.stages.pipeline_program import PipelineProgram
from kdist.stages.stage_programs import StagePrograms
from kdist.storage.variables import Stored

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class _Run:
    """A pass over the stages.

    Attributes:
        order: Its instructions, one by one.
        micro: The batch.
        flows: Per replica, its values.
        recorder: Notes when instructions ran, if that is wanted.
        chains: By replica and stage, what comes after what.
    """

    order: Sequence[Instruction]
    micro: MicroBatches
    flows: list[Flow]
    recorder: Recorder | None
    chains: dict[tuple[int, int], Chain] = dataclasses.field(default_factory=dict)


def freed_between_chunks(placement: Placement) -> bool:
    """Whether a stage gathers a weight for one of its chunks at a time."""
    return placement.gathered and len(placement.groups) == 1


class PipelineRunner:
    """Runs a model's stages.

    Args:
        program: What the stages share.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        backend: What a stage runs on: `OneDevice` or `InnerAxes`.
        recorder: Gives what records when training steps ran what, if they are to be recorded.
        want_outputs: Whether training and test steps must return the model's outputs.
        want_parts: Whether they must return every part of the loss.
        keep_gathered: Whether a stage keeps what it gathers until the step ends.

    Attributes:
        freed: Identities of the trainable variables that a stage lets go when it turns from one of
            its chunks to another, and gathers again. Those of several stages are kept.
        gathers: The trainable variables of each gather of the training step that was traced last.
    """

    def __init__(
        self,
        program: PipelineProgram,
        entries: Sequence[Stored],
        topology: Topology,
        backend: Any,
        recorder: Callable[[], Recorder | None] = lambda: None,
        *,
        want_outputs: bool,
        want_parts: bool,
        keep_gathered: bool = False,
    ) -> None:
        self.program, self.entries, self.topology = program, list(entries), topology
        self.backend, self.recorder = backend, recorder
        self.want_outputs, self.want_parts = want_outputs, want_parts
        self.staged = program.staged
        self.schedule = program.staged.schedule
        self.programs = StagePrograms(program, backend)
        gathered = [i for i, e in enumerate(entries) if e.placement.gathered]
        self._positions = {id(entries[i].variable): i for i in gathered}
        self.freed: set[int] = set()
        if not keep_gathered:
            self.freed = {id(e.variable) for e in entries if freed_between_chunks(e.placement)}
        self.gathers: list[tuple[int, ...]] | None = None

    @property
    def devices(self) -> list[str]:
        """The device on which each replica's outputs are: its last stage's."""
        last = self.staged.stage_of(self.schedule.virtual_stages - 1)
        return [self.topology.slices[s].devices[0] for s in self.topology.group(last)]

    def gradients(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> list[dict[str, Any]]:
        """Loss and gradients of every replica; see `Program.loss_and_gradients`."""
        wanted = Pass(training=True, differentiate=True, split=self.schedule.splits_backward)
        scale = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
        flows = self._flows(wanted, self.schedule, batch, scale, with_loss=True)
        return [flow.result(self.want_outputs, self.want_parts) for flow in flows]

    def losses(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Loss and outputs of every replica, in inference mode."""
        schedule = forward_only(self.schedule)
        flows = self._flows(Pass(training=False), schedule, batch, None, with_loss=True)
        return [flow.result(self.want_outputs, self.want_parts) for flow in flows]

    def outputs(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """See `PlainRunner.outputs`, per replica."""
        schedule = forward_only(self.schedule)
        flows = self._flows(Pass(training=False), schedule, batch, None, with_loss=False)
        return [flow.result(True, False) for flow in flows]

    def collect(self, batch: SplitBatch, training: bool) -> Collected:
        """See `PlainRunner.collect`: all forwards, of every replica and micro-batch."""
        schedule = self.schedule if training else forward_only(self.schedule)
        split = schedule.splits_backward
        wanted = Pass(training=training, differentiate=training, split=split, whole=True)
        run = self._begun(wanted, schedule, batch, None, with_loss=False)
        self._write(run, [one for one in run.order if isinstance(one, Forward)])
        results = [flow.result(self.want_outputs, False) for flow in run.flows]
        micro = run.micro
        every = [part for row in micro.parts for part in row]
        counts = [count for row in micro.counts for count in row]
        parts = [flow.collected(i) for flow in run.flows for i in range(len(flow.parts))]
        state = self.program.state
        with tf.device(self.devices[0]):
            params = [value_at(state, v, self.topology, 0) for v in state.trainable]
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
        """See `PlainRunner.pull_back`: all backwards of what `collect` ran forward."""
        run, given = collected.inputs, iter(zip(cotangents, added, strict=True))
        for flow in run.flows:
            for i in range(len(flow.parts)):
                flow.give_cotangents(i, *next(given))
        self._write(run, [one for one in run.order if not isinstance(one, Forward)])
        return [flow.summed() for flow in run.flows]

    def _flows(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> list[Flow]:
        """The replicas, once everything is written into the graph of the step."""
        try:
            run = self._begun(wanted, schedule, batch, scale, with_loss)
            self._write(run, run.order)
        except Retrace:  # nothing that was written has an effect
            self.programs.trace_anew()
            run = self._begun(wanted, schedule, batch, scale, with_loss)
            self._write(run, run.order)
        return run.flows

    def _begun(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> _Run:
        """A pass of which nothing is written yet."""
        exact = self.backend.exact
        micro = MicroBatches.of(batch, schedule.micro_batches, static=exact)
        named = [[(self.program.inputs_by_name(x), y, w) for x, y, w in row] for row in micro.parts]
        terms = len(self.program.kinds) if with_loss else None
        every = general([part for row in named for part in row])
        functions = [
            [self.programs.functions(wanted, part if exact else every, terms) for part in row]
            for row in named
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
        if wanted.differentiate:
            self.gathers = []
        order = execution_order(schedule, self._written(functions[0][0]))
        return _Run(order, micro, flows, recorder)

    def _write(self, run: _Run, instructions: Sequence[Instruction]) -> None:
        """Writes instructions of every replica into the graph of the step, in order."""
        for one in instructions:
            for r, flow in enumerate(run.flows):
                chain = run.chains.setdefault((r, one.stage), Chain())
                with instantiated_cheaply(self.devices):
                    first, last = flow.run(one, run.recorder)
                self._order(one, chain, first, last)
        if run.recorder is not None and instructions[-1] == run.order[-1]:
            run.recorder.end(lambda r, stage: run.flows[r].device(stage))

    def _order(self, one: Instruction, chain: Chain, first: Any, last: Any) -> None:
        """Puts an instruction after the one before on its stage."""
        chain.add(first, last)

    def note_gather(self, replica: int, variable: Any) -> None:
        """Notes that a replica, and so each, gathers a variable, if it is not stored whole."""
        position = self._positions.get(id(variable))
        if replica == 0 and position is not None and self.gathers is not None:
            self.gathers.append((position,))

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
        counted = []
        for r, device in enumerate(self.devices):
            with tf.device(device):
                values = {i: self._value(r, i) for i in function.used if i < function.variables}
                counted.append(
                    [
                        function(values.__getitem__, part, rows)
                        for part, rows in zip(micro.parts[r], micro.counts[r])
                    ]
                )
        return counted

    def _value(self, replica: int, position: int) -> Any:
        """A variable's value for the counting pass, trainable ones first, then carried."""
        state = self.program.state
        variable = (*state.trainable, *state.carried)[position]
        return value_at(state, variable, self.topology, self.topology.slice_number(0, replica))

    def gradient_at(self, results: Sequence[Any]) -> GradientSource:
        """How the update reads gradients; see `PlainRunner.gradient_at`."""
        found = {s: gradients for replica in results for s, gradients in replica.items()}
        return self.backend.source(found, self.program.trained.rows)

    def recorded(self) -> list[Collective]:
        """Collectives of the lowered functions of one replica, each function once."""
        return [one for part in self.programs.trained_parts() for one in part.recorded]

    def islands(self) -> list[Island]:
        """What of the stages runs on whole operands."""
        return islands_of(self.programs.trained_parts())

    def lower_without_loss(self, x: Any) -> None:
        """Refuses: only a step lowers the stages.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "The collectives of a pipeline's stages are read from a training step. Train one batch "
            f"first, with fit or train_on_batch. Received: model={self.program.model.name!r}, "
            "which has not trained yet"
        )

    def gathered_paths(self) -> list[str]:
        """Weights that are made whole before use because an operation cannot take parts."""
        return self.backend.gathered_paths()
