"""Runs a pipeline whose stages have inner axes, in the step's graph.

As on plain devices an instruction calls a function of its virtual stage, on the devices of its
slice, and the calls of one stage are chained in the schedule's order. Collectives of a stage stay
within its slice; between stages, each device sends its part to its peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist import spmd
from kdist.batch import SplitBatch
from kdist.dtensor.lowering import Island
from kdist.dtensor.sharded import Sharded, replicate
from kdist.lowered import Collective
from kdist.mesh import Topology
from kdist.parts import whole_of
from kdist.pipeline.functions import Pass
from kdist.pipeline.mesh_flow import MeshFlow
from kdist.pipeline.mesh_functions import MeshPrograms, penalty_function
from kdist.pipeline.mesh_gradients import MeshPipelineGradients
from kdist.pipeline.mesh_inputs import StageInputs, used_by_stage
from kdist.pipeline.micro import MicroBatches
from kdist.pipeline.program import PipelineProgram
from kdist.pipeline.recorder import Recorder
from kdist.pipeline.runner import PipelineRunner
from kdist.pipeline.schedule import Schedule
from kdist.sparse import LookUp
from kdist.spmd_call import Lowered, Retrace
from kdist.store import ModelLayouts
from kdist.variables import Stored

import keras


class MeshPipelineRunner(PipelineRunner):
    """Runs a model's stages on slices with inner axes.

    Args:
        program: The functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        layouts: The model's resolved layouts.
        recorder: See `PipelineRunner`.
        alltoall: Whether re-layouts may use all-to-all.
        want_outputs: Whether training and test steps must return the model's outputs.
        want_parts: Whether they must return every part of the loss.
    """

    def __init__(
        self,
        program: PipelineProgram,
        entries: Sequence[Stored],
        topology: Topology,
        layouts: ModelLayouts,
        recorder: Callable[[], Recorder | None],
        *,
        alltoall: bool,
        want_outputs: bool,
        want_parts: bool,
    ) -> None:
        super().__init__(program, entries, topology, recorder)
        self.want_outputs, self.want_parts = want_outputs, want_parts
        self.mesh = spmd.make_mesh(topology)
        placements = [entry.placement for entry in entries]
        self.programs = MeshPrograms(program, placements, topology, self.mesh, layouts, alltoall)
        used = used_by_stage(self.staged, self.programs.bodies)
        self.inputs = StageInputs(program.state, entries, topology, self.mesh, used)
        self.look_ups: dict[tuple[int, int], LookUp] = {}
        self._lower = lambda function: Lowered(
            function, layouts, topology, self.mesh, alltoall, self.programs.paths
        )
        self._penalties: dict[tuple[int, ...], Lowered] = {}

    def outputs(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """See `PlainRunner.outputs`, per replica."""
        wanted, self.want_outputs = self.want_outputs, True
        try:
            return super().outputs(batch)
        finally:
            self.want_outputs = wanted

    def _run_schedule(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> list[dict[str, Any]]:
        try:
            return self._run_once(wanted, schedule, batch, scale, with_loss)
        except Retrace:  # before anything was written
            self.programs.gather_gradients_first()
            return self._run_once(wanted, schedule, batch, scale, with_loss)

    def _run_once(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> list[dict[str, Any]]:
        micro = MicroBatches.of(batch, schedule.micro_batches, static=True)
        named = [[(self.program.inputs_by_name(x), y, w) for x, y, w in row] for row in micro.parts]
        terms = len(self.program.kinds) if with_loss else None
        functions = [
            [self.programs.functions(wanted, part, terms) for part in row] for row in named
        ]
        if wanted.differentiate:
            for part in functions[0][0]:
                self.look_ups.update(
                    {(v, part.body.virtual): u for v, u in part.look_ups().items()}
                )
        shares = None
        if terms is not None:
            shares = micro.term_shares(self._counted(micro, wanted, terms), terms)
        values = self.inputs.values()
        flows = []
        for r in range(self.topology.data_size):
            own = None if shares is None else shares[r]
            flows.append(
                MeshFlow(self, r, functions[r], micro, named[r], own, scale, values=values)
            )
        recorder = self.recorder() if wanted.differentiate else None
        self._write(schedule, self._written(functions[0][0]), flows, recorder)
        return [self._read(flow, wanted.training) for flow in flows]

    def _read(self, flow: MeshFlow, training: bool) -> dict[str, Any]:
        result = flow.result(self.want_outputs)
        return {**result, "updated": self._updated_whole(result["updated"], training)}

    def penalties(
        self, s: int, positions: Sequence[int], params: list[Any], scale: Any
    ) -> tuple[list[Any], list[Any]]:
        """Weight penalties of some variables, and their scaled gradients, on a slice."""
        key = tuple(positions)
        if key not in self._penalties:
            variables = [self.program.state.trainable[p] for p in positions]
            self._penalties[key] = self._lower(penalty_function(variables, keras.config.floatx()))
        values, gradients = self._penalties[key](s, key, (params, replicate(scale, self.mesh)))
        return list(values), list(gradients)

    def gradient_at(self, results: Sequence[Any]) -> Any:
        """How the update reads gradients."""
        return MeshPipelineGradients(
            results, self.program.trained, self.look_ups, self.entries, self.topology
        )

    def _updated_whole(self, updated: Sequence[Sharded], training: bool) -> list[Any]:
        """New state as whole tensors."""
        state = self.program.state
        placements = {i: entry.placement for i, entry in enumerate(self.inputs.fixed)}
        after = len(state.carried)
        placements |= {after + i: entry.placement for i, entry in enumerate(self.entries)}
        return [
            whole_of(placements[i], one.parts.__getitem__) if i in placements else one.parts[0]
            for i, one in zip(self.program.traced(training).updated, updated)
        ]

    def recorded(self) -> list[Collective]:
        """Collectives of the lowered functions of one replica, each function once."""
        return self.programs.recorded()

    def islands(self) -> list[Island]:
        """What of the stages runs on whole operands."""
        return self.programs.islands()

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
        return self.programs.gathered_paths()
