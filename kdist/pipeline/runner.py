"""Runs a pipeline over plain devices: one device per stage and replica, one graph per step.

The schedule is data; this reads it. An instruction calls a function of its virtual stage on the
stage's device; calls of one stage are chained in the schedule's order (`kdist.pipeline.order`).
Everything else is edges of the graph: boundary tensors go to the next stage's device, their
gradients back, gradients add up where the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.batch import SplitBatch
from kdist.mesh import Topology
from kdist.pipeline.flow import Flow, carried_value
from kdist.pipeline.functions import Pass
from kdist.pipeline.instructions import Instruction
from kdist.pipeline.leaves import general
from kdist.pipeline.micro import MicroBatches
from kdist.pipeline.order import Chain, execution_order, forward_only
from kdist.pipeline.program import PipelineProgram
from kdist.pipeline.recorder import Recorder
from kdist.pipeline.replica_flow import ReplicaFlow
from kdist.pipeline.schedule import Schedule
from kdist.plain import Begin, PlainGradients, PlainRunner
from kdist.variables import Stored

import tensorflow as tf


class PipelineRunner(PlainRunner):
    """Runs a model's stages.

    Args:
        program: The functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        recorder: Gives what records when training steps ran what, if they are to be recorded.
    """

    program: PipelineProgram

    def __init__(
        self,
        program: PipelineProgram,
        entries: Sequence[Stored],
        topology: Topology,
        recorder: Callable[[], Recorder | None] = lambda: None,
    ) -> None:
        super().__init__(program, entries, topology)
        self.recorder = recorder
        self.staged = program.staged
        self.schedule = program.staged.schedule

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
        return self._run_schedule(wanted, self.schedule, batch, scale, with_loss=True)

    def losses(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Loss and outputs of every replica, in inference mode."""
        schedule = forward_only(self.schedule)
        return self._run_schedule(Pass(training=False), schedule, batch, None, with_loss=True)

    def outputs(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """See `PlainRunner.outputs`, per replica."""
        schedule = forward_only(self.schedule)
        return self._run_schedule(Pass(training=False), schedule, batch, None, with_loss=False)

    def _run_schedule(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> list[dict[str, Any]]:
        micro = MicroBatches.of(batch, schedule.micro_batches)
        named = [[(self.program.inputs_by_name(x), y, w) for x, y, w in row] for row in micro.parts]
        terms = len(self.program.kinds) if with_loss else None
        example = general([part for row in named for part in row])
        functions = self.program.functions(wanted, example, terms)
        shares = None
        if terms is not None:
            shares = micro.term_shares(self._counted(micro, wanted, terms), terms)
        flows = [
            Flow(self, r, functions, micro, named[r], None if shares is None else shares[r], scale)
            for r in range(self.topology.data_size)
        ]
        recorder = self.recorder() if wanted.differentiate else None
        self._write(schedule, self._written(functions), flows, recorder)
        return [flow.result() for flow in flows]

    def _write(
        self,
        schedule: Schedule,
        written: Mapping[str, Sequence[int]],
        flows: Sequence[ReplicaFlow],
        recorder: Recorder | None,
    ) -> None:
        """Writes the instructions of every replica into the graph of the step, in order."""
        chains: dict[tuple[int, int], Chain] = {}
        if recorder is not None:
            recorder.begin(schedule)
        for one in execution_order(schedule, written):
            for r, flow in enumerate(flows):
                with self._cheaply():
                    first, last = flow.run(one, recorder)
                self._order(one, chains.setdefault((r, one.stage), Chain()), first, last)
        if recorder is not None:
            recorder.end(lambda r, stage: flows[r].device(stage))

    def _order(self, one: Instruction, chain: Chain, first: Any, last: Any) -> None:
        """Puts an instruction after the one before on its stage."""
        chain.add(first, last)

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
                values = {i: self.value(r, i) for i in function.used if i < function.variables}
                counted.append(
                    [
                        function(values.__getitem__, part, rows)
                        for part, rows in zip(micro.parts[r], micro.counts[r])
                    ]
                )
        return counted

    def value(self, replica: int, position: int) -> Any:
        """A variable's value for the counting pass, trainable ones first, then carried."""
        count = len(self.program.state.trainable)
        if position < count:
            entry = self.entries[position]
            group = entry.placement.home
            return entry.whole_at(group[replica])
        variable = self.program.state.carried[position - count]
        return carried_value(self.program.state, variable, replica, self.topology, 0)

    def gradient_at(self, results: Sequence[Any]) -> Any:
        """How the update reads gradients; see `PlainRunner.gradient_at`."""
        found = {s: gradients for replica in results for s, gradients in replica.items()}
        devices = [one.devices[0] for one in self.topology.slices]
        return PlainGradients(found, self.program.trained.rows, self.entries, devices)
