"""The functions of the virtual stages as programs over the inner axes.

They are cut from the same joint traces as those of plain devices (`kdist.pipeline.functions`);
here these are traced with declared layouts, and each part is lowered. The collectives of a stage
stay inside its slice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist import spmd
from kdist.dtensor import sizes
from kdist.dtensor.flops import graph_flops
from kdist.dtensor.islands import crosses, is_handed_on
from kdist.dtensor.lowering import Island
from kdist.dtensor.sharded import Sharded
from kdist.hooks import declared_layouts
from kdist.lowered import Collective
from kdist.mesh import Topology
from kdist.pipeline.body import StageBody, StageInput, StageOutput
from kdist.pipeline.functions import Pass, StageFunctions
from kdist.pipeline.halves import StageVjp
from kdist.pipeline.program import PipelineProgram, batch_key
from kdist.placement import Placement
from kdist.spmd_call import MAX_SHAPES, Lowered
from kdist.spmd_program import laid_out, like, loss_view, whole_in_program, whole_readers
from kdist.store import ModelLayouts

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class MeshBody(StageBody):
    """A virtual stage over DTensors.

    Args:
        program: See `StageBody`.
        virtual: See `StageBody`.
        placements: Of every trainable variable.
        topology: The mesh.
        gathered: Identities of the weights that are made whole before use.
    """

    def __init__(
        self,
        program: PipelineProgram,
        virtual: int,
        placements: Sequence[Placement],
        topology: Topology,
        gathered: set[int],
    ) -> None:
        super().__init__(program, program.staged, virtual)
        self.placements = [placements[i] for i in self.trainable]
        self.topology = topology
        self.gathered = gathered

    def run(self, params: Sequence[Any], given: StageInput, training: bool) -> StageOutput:
        """See `StageBody.run`; new state gets the layout of the old."""
        variables = [self.program.state.trainable[i] for i in self.trainable]
        before = {**given.state, **{id(v): p for v, p in zip(variables, params)}}
        used = [self._used_value(id(v), p) for v, p in zip(variables, params)]
        state = {key: self._used_value(key, value) for key, value in given.state.items()}
        given = StageInput(
            given.boundary, given.masks, state, given.inputs, given.loss, given.rows_share
        )
        result = super().run(used, given, training)
        result.state = {key: like(value, before[key]) for key, value in result.state.items()}
        return result

    def _used_value(self, key: int, value: Any) -> Any:
        return whole_in_program(value) if key in self.gathered else value

    def seen(self, outputs: Any) -> Any:
        """See `StageBody.seen`."""
        view = loss_view()
        return outputs if view is None else view(outputs)


class MeshVjp(StageVjp):
    """Forward and backward over DTensors: gradients have the layouts of their parameters.

    Args:
        body: What is differentiated.
        *args: See `StageVjp`.
        **options: See `StageVjp`.
    """

    def __init__(self, body: MeshBody, *args: Any, **options: Any) -> None:
        self._body = body
        super().__init__(*args, **options)

    def _passes(self, tensor: Any) -> bool:
        """See `Vjp._passes`; lists of tensors stay in the function in which they are made."""
        # Sizes that the trace of a family of shapes does not know are known from examples.
        passes = crosses if sizes.active() is None else is_handed_on
        return all(map(passes, tensor.op.outputs))

    def _laid_out(self, source: Any, gradient: Any) -> Any:
        for param, placement in zip(self._arguments[0], self._body.placements):
            if param is source:
                return laid_out(gradient, param, placement, self._body.topology)
        return gradient


class MeshStageFunctions(StageFunctions):
    """See `StageFunctions`; calls take and give `Sharded` tensors."""

    body: MeshBody

    def _make_vjp(self, *args: Any, **options: Any) -> StageVjp:
        return MeshVjp(self.body, *args, **options)


class LoweredPart(Lowered):
    """A concrete function of a stage, as a program on the slices of its replicas.

    Args:
        concrete: The function.
        programs: Knows the mesh and the replica at work.
        stage: Whose function it is.
    """

    def __init__(self, concrete: Any, programs: MeshPrograms, stage: int) -> None:
        layouts, topology = programs.layouts, programs.topology
        alltoall, paths = programs.alltoall, programs.paths
        super().__init__(concrete, layouts, topology, programs.mesh, alltoall, paths)
        self.traces[None, sizes.active()] = concrete
        self.gather_first = programs.gather_first
        self.slices = topology.group(stage)
        self.programs = programs

    def lower(self, key: Any, inputs: Any) -> tuple[Any, list[Sharded]]:
        """See `Lowered.lower`; the whole pipeline is traced again, if anything is.

        Raises:
            Retrace: It has to be.
        """
        return self._lower(key, inputs)

    def _refuse_all_island(self, islands: Sequence[Island]) -> None:
        """Refuses nothing: what is left to divide may be in other parts."""

    def flops(self) -> float:
        """Of its matrix products."""
        return graph_flops(next(iter(self.traces.values())).graph)

    def call(self, *inputs: Any) -> list[Sharded]:
        """Calls it on the slice of the replica at work."""
        return list(self(self.slices[self.programs.replica], None, list(inputs)))


class MeshPrograms:
    """The lowered functions of every virtual stage.

    Args:
        program: The model's program.
        placements: Of every trainable variable.
        topology: The mesh.
        mesh: DTensor mesh of every slice.
        layouts: The model's resolved layouts.
        alltoall: Whether re-layouts may use all-to-all.

    Attributes:
        replica: Whose functions are called next.
        gather_first: Whether gradients are gathered before they are cut; see `spmd.Trace`.
        gathered: Identities of the weights that are made whole before use.
    """

    def __init__(
        self,
        program: PipelineProgram,
        placements: Sequence[Placement],
        topology: Topology,
        mesh: dtensor.Mesh,
        layouts: ModelLayouts,
        alltoall: bool,
    ) -> None:
        self.program, self.topology, self.layouts = program, topology, layouts
        self.mesh, self.alltoall = mesh, alltoall
        self.paths = [
            layer.path or layer.name for layer in layouts.model_layers if layer is not program.model
        ]
        self.replica = 0
        self.gather_first = False
        self.gathered = whole_readers(layouts)
        count = program.staged.schedule.virtual_stages
        self.bodies = [
            MeshBody(program, virtual, placements, topology, self.gathered)
            for virtual in range(count)
        ]
        self._traced: dict[Any, list[StageFunctions]] = {}
        self._parts: dict[Any, tuple[Pass, list[LoweredPart]]] = {}

    def functions(self, wanted: Pass, part: Any, terms: int | None) -> list[StageFunctions]:
        """See `PipelineProgram.functions`.

        Raises:
            CannotExpand: DTensor cannot run one of them.
        """
        key = (wanted, terms, sizes.active(), *batch_key(part))
        if key in self._traced:
            return self._traced[key]
        parts: list[LoweredPart] = []

        def make(body: StageBody, given: StageInput) -> StageFunctions:
            def wrap(concrete: Any) -> Callable:
                stage = self.program.staged.stage_of(body.virtual)
                parts.append(LoweredPart(concrete, self, stage))
                return parts[-1].call

            with (
                spmd.tracing(self.mesh, self.topology, alltoall=self.alltoall) as trace,
                declared_layouts(self.layouts),
            ):
                trace.gather_first = self.gather_first
                trace.alltoall = self.alltoall or not self.gather_first
                made = MeshStageFunctions(body, given, wanted, wrap)
            self.layouts.tell_uncut(trace.uncut)
            return made

        found = self.program.trace(wanted, part, terms, self.bodies, make)
        self._traced[key] = found
        self._parts[key] = wanted, parts
        for old in [*self._traced][: -2 * MAX_SHAPES]:
            del self._traced[old], self._parts[old]
        return found

    def gather_gradients_first(self) -> None:
        """Forgets what was traced, to trace it again without all-to-alls."""
        self.gather_first = True
        self._traced.clear()
        self._parts.clear()

    def recorded(self) -> list[Collective]:
        """Collectives of the lowered training functions: each once, of the first micro-batch."""
        for wanted, parts in self._parts.values():
            if wanted.differentiate:
                return [one for part in parts for one in part.recorded]
        return []

    def islands(self) -> list[Island]:
        """What of the training functions runs on whole operands; shares are of all of them."""
        for wanted, parts in self._parts.values():
            if wanted.differentiate:
                total = sum(part.flops() for part in parts)
                found = [island for part in parts for island in part.islands]
                return [dataclasses.replace(i, share=i.flops / (total or 1.0)) for i in found]
        return []

    def gathered_paths(self) -> list[str]:
        """Weights that are made whole before use because an operation cannot take parts."""
        state = self.program.state
        weights: list[keras.Variable] = [*state.trainable, *state.carried]
        return [v.path for v in weights if id(v) in self.gathered]


def penalty_function(variables: Sequence[keras.Variable], dtype: str) -> Callable:
    """Weight penalties of some variables, and their gradients times a scale.

    Args:
        variables: They have regularizers.
        dtype: Of the penalties.

    Returns:
        `function(params, scale) -> (values, gradients)`; a gradient is None where there is none.
    """

    def function(params: list[Any], scale: Any) -> tuple[list[Any], list[Any]]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            values = [
                tf.cast(tf.reduce_sum(v.regularizer(p)), dtype) for v, p in zip(variables, params)
            ]
            target = tf.add_n(values) * tf.cast(scale, dtype)
        gradients = tape.gradient(target, params)
        return values, [
            tf.zeros_like(p) if g is None else like(g, p) for g, p in zip(gradients, params)
        ]

    return function
