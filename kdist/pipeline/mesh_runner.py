"""Runs a pipeline whose stages are DTensor meshes: instruction by instruction, from Python.

The order is the one that the validator proves free of deadlock, round by round: what may run at the
same time is called one after the other without waiting. Collectives of a stage stay within its
mesh; between stages, each device sends its part to its peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import spmd
from kdist.batch import SplitBatch
from kdist.lowered import Collective
from kdist.mesh import Topology
from kdist.parts import whole_of
from kdist.pipeline.functions import Pass
from kdist.pipeline.mesh_flow import MeshFlow
from kdist.pipeline.mesh_functions import MeshPrograms, add_lists, penalty_function
from kdist.pipeline.mesh_gradients import MeshPipelineGradients
from kdist.pipeline.mesh_inputs import StageInputs, used_by_stage
from kdist.pipeline.micro import MicroBatches
from kdist.pipeline.order import execution_order
from kdist.pipeline.program import PipelineProgram
from kdist.pipeline.runner import PipelineRunner
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.step import PipelineStep
from kdist.sparse import LookUp
from kdist.spmd_call import CannotExpand, Lowered, Retrace, signature
from kdist.spmd_step import SpmdStep
from kdist.store import ModelLayouts
from kdist.variables import Stored

import keras
import tensorflow as tf


class MeshPipelineRunner(PipelineRunner):
    """Runs a model's stages on DTensor meshes.

    Args:
        program: The functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        layouts: The model's resolved layouts.
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
        *,
        alltoall: bool,
        want_outputs: bool,
        want_parts: bool,
    ) -> None:
        super().__init__(program, entries, topology)
        self.want_outputs, self.want_parts = want_outputs, want_parts
        self.meshes = [spmd.make_mesh(one.devices, topology) for one in topology.slices]
        placements = [entry.placement for entry in entries]
        self.programs = MeshPrograms(program, placements, topology, self.meshes, layouts, alltoall)
        used = used_by_stage(self.staged, self.programs.bodies)
        self.inputs = StageInputs(program.state, entries, topology, self.meshes, used)
        self.look_ups: dict[tuple[int, int], LookUp] = {}
        self._lower = lambda function: Lowered(
            function, layouts, topology, self.meshes, alltoall, self.programs.paths
        )
        self._adder = self._lower(add_lists)
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
        _refuse_sparse(batch)
        try:
            return self._run_once(wanted, schedule, batch, scale, with_loss)
        except Retrace:  # before anything was written
            self.programs.gather_gradients_first()
            return self._run_once(wanted, schedule, batch, scale, with_loss)

    def _run_once(
        self, wanted: Pass, schedule: Schedule, batch: SplitBatch, scale: Any, with_loss: bool
    ) -> list[dict[str, Any]]:
        micro = MicroBatches.of(batch, schedule.micro_batches)
        named = [[(self.program.inputs_by_name(x), y, w) for x, y, w in row] for row in micro.parts]
        terms = len(self.program.kinds) if with_loss else None
        functions = [
            [self.programs.functions(wanted, part, terms, r) for part in row]
            for r, row in enumerate(named)
        ]
        if wanted.differentiate:
            for part in functions[0][0]:
                self.look_ups.update(
                    {(v, part.body.virtual): u for v, u in part.look_ups().items()}
                )
        shares = None
        if terms is not None:
            shares = micro.term_shares(self._counted(micro, wanted, terms), terms)
        values = self.inputs.packed()
        flows = []
        for r in range(self.topology.data_size):
            own = None if shares is None else shares[r]
            flows.append(
                MeshFlow(self, r, functions[r], micro, named[r], own, scale, values=values)
            )
        for one in execution_order(schedule, self._written(functions[0][0])):
            for flow in flows:
                flow.run(one)
        return [flow.result(self.want_outputs) for flow in flows]

    def add(self, s: int, which: tuple[int, ...], first: list[Any], second: list[Any]) -> list[Any]:
        """Sums of gradients of some variables, on a slice."""
        key = (which, self.topology.slices[s].stage, signature(first))
        return list(self._adder(s, key, (first, second)))

    def penalties(
        self, s: int, positions: Sequence[int], params: list[Any], scale: Any
    ) -> tuple[list[Any], list[Any]]:
        """Weight penalties of some variables, and their scaled gradients, on a slice."""
        key = tuple(positions)
        if key not in self._penalties:
            variables = [self.program.state.trainable[p] for p in positions]
            self._penalties[key] = self._lower(penalty_function(variables, keras.config.floatx()))
        values, gradients = self._penalties[key](
            s, key, (params, spmd.replicate(scale, self.meshes[s]))
        )
        return list(values), list(gradients)

    def gradient_at(self, results: Sequence[Any]) -> Any:
        """How the update reads gradients."""
        return MeshPipelineGradients(
            results, self.program.trained, self.look_ups, self.entries, self.topology
        )

    def updated_whole(self, updated: Sequence[Any], training: bool) -> list[Any]:
        """Statistics as whole tensors, from their parts on the devices of a slice."""
        state = self.program.state
        placements = {i: entry.placement for i, entry in enumerate(self.inputs.fixed)}
        after = len(state.carried)
        placements |= {after + i: entry.placement for i, entry in enumerate(self.entries)}
        return [
            whole_of(placements[i], parts.__getitem__) if i in placements else parts[0]
            for i, parts in zip(self.program.traced(training).updated, updated)
        ]

    def recorded(self) -> list[Collective]:
        """Collectives of the lowered functions of one replica, each function once."""
        return self.programs.recorded()

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


class MeshPipelineStep(SpmdStep, PipelineStep):
    """Train, test and predict steps over stages that are DTensor meshes."""


def _refuse_sparse(batch: SplitBatch) -> None:
    if any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(batch.whole)):
        raise CannotExpand("sparse inputs")
