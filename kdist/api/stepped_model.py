"""Which program and runner execute a model's steps, made on first use."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_models, keras_remat, keras_trainer, keras_xla
from kdist.api.planned_model import PlannedModel
from kdist.config.parallel import ParallelConfig
from kdist.optimizer.wrappers import row_updates, sums_rows
from kdist.pipeline.work import Work
from kdist.program.program import Program
from kdist.rows.model import study_model
from kdist.rows.model_study import ModelStudy
from kdist.runtime.chunked_runner import ChunkedRunner
from kdist.runtime.chunking import AROUND_LOSS, Chunking
from kdist.runtime.inner_axes import InnerAxes
from kdist.runtime.keras_contract import has_composites
from kdist.runtime.loss_terms import OVERRIDDEN
from kdist.runtime.mesh_around_loss import MeshAroundLoss
from kdist.runtime.mesh_runner import MeshRunner
from kdist.runtime.mesh_step import (
    MeshPipelineStep,
    MeshStep,
    WholeLossMeshPipelineStep,
    WholeLossMeshStep,
)
from kdist.runtime.metrics import overrides
from kdist.runtime.one_device import OneDevice
from kdist.runtime.pipeline_runner import PipelineRunner
from kdist.runtime.pipeline_step import PipelineStep
from kdist.runtime.plain_runner import PlainRunner
from kdist.runtime.recorder import TimelineRecorder
from kdist.runtime.runner_contract import Runner
from kdist.runtime.stage_backend import StageBackend
from kdist.runtime.step import Step
from kdist.runtime.whole_loss import WholeLossPipelineStep, WholeLossStep
from kdist.stages.pipeline_program import PipelineProgram
from kdist.storage.constant_ids import ConstantIds
from kdist.storage.sparse import LookUp
from kdist.storage.variables import Stored

import keras
import tensorflow as tf

STEPS: Mapping[tuple[bool, bool, bool], type[Step]] = {
    (False, False, False): Step,
    (False, False, True): WholeLossStep,
    (False, True, False): PipelineStep,
    (False, True, True): WholeLossPipelineStep,
    (True, False, False): MeshStep,
    (True, False, True): WholeLossMeshStep,
    (True, True, False): MeshPipelineStep,
    (True, True, True): WholeLossMeshPipelineStep,
}
"""By (over inner axes, in stages, with a loss over the whole batch)."""


class SteppedModel(PlannedModel):
    """A placed model's pure functions, and the steps that run them.

    Attributes:
        jit_compile: What `compile` was given, or Keras made of it.
        xla_of_keras: Whether that is XLA, and nobody asked for it.
        program: The model's pure functions, once compiled and used.
        recorder: Notes when a pipeline's training steps ran what, if set.
        row_studies: Where rows of the batch meet in the model, by whether in training.
        observed: Whether training steps return outputs and every part of the loss in any case.
    """

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        super().__init__(model, config)
        self.jit_compile: bool | str = "auto"
        self.xla_of_keras = False
        self.program: Program | None = None
        self.recorder: TimelineRecorder | None = None
        self.row_studies: dict[bool, ModelStudy] = {}
        self.observed = False
        self._mesh_runner: MeshRunner | PipelineRunner | None = None
        self._without_batch: Any = None

    def forget_steps(self, jit_compile: bool | str) -> None:
        """Makes programs and steps anew on their next use, compiled as asked."""
        self.jit_compile = jit_compile
        self.program = self.update = self.loss_terms = None
        self.schedule_stages()
        self._mesh_runner = self._without_batch = None
        self.__dict__.pop("plain_step", None)
        self.__dict__.pop("mesh_step", None)

    def study_rows(self, training: bool) -> ModelStudy:
        """Where rows of the batch meet in the model, looked at on first use; warns of it, once.

        Args:
            training: Whether in the pass of training; one that is known is not done again for the
                other, unless layers give it losses.
        """
        known, of_training = self.row_studies.get(training), self.row_studies.get(True)
        if known is None and of_training is not None and not of_training.adds_losses:
            known = of_training
        if known is not None:
            return known
        pipeline = self.config.pipeline
        cut = pipeline is not None and pipeline.micro_batches > 1
        if self.compute.data_size == 1 and not cut:
            return ModelStudy()
        x = self.example_input
        if x is None and self.model.built:
            x = getattr(keras_models.functional_of(self.model) or self.model, "input", None)
        with keras_remat.taken_back(self.model):
            study = study_model(self.model, x, training, self.config.loss_from_layers)
        if x is None:
            return study  # not for long: the first batch shows the inputs
        self.row_studies[training] = study
        texts = [study.warning(micro_batches=cut)]
        if pipeline is not None and cut and training:
            texts.append(study.of_micro_batches(pipeline.micro_batches))
        for text in filter(None, texts):
            self.warn_once(text)
        return study

    @property
    def constant_ids(self) -> ConstantIds:
        """What the model looks up whatever the batch holds, in training, as far as it is known."""
        return self.row_studies.get(True, ModelStudy()).constant_ids

    def rows_stay_apart(self, x: Any) -> bool:
        """Whether each row of what the model predicts follows from that row of its input alone."""
        with keras_remat.taken_back(self.model):
            study = study_model(self.model, x, False, self.config.loss_from_layers)
        return study == ModelStudy()

    def make_program(self) -> Program:
        """The model's pure functions, by stages or whole."""
        mean = self.config.loss_from_layers == "mean"
        self.schedule_stages()
        if self.staged is None:
            program = Program(self.model, mean)
        else:
            program = PipelineProgram(self.model, mean, self.staged)
        program.blocks, program.row_studies = self.blocks, self.row_studies
        assert self.layouts is not None
        program.place_tables(self.layouts.fetched_layers)
        variables = self.trained
        summed = sums_rows(self.model.optimizer if self.model.compiled else None, variables)
        for table in program.tables.tables:
            table.entry.combined = table.position in summed
            table.entry.prefetch = table.layer in self.layouts.prefetched
        return program

    def fall_back(self, reason: str) -> None:
        """Says, once, why something does not run over DTensor."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            self.warn_once(reason)

    def say_whole_loss(self) -> None:
        """Says, once, that a loss is computed over the whole batch, where nobody asked for it."""
        if self.whole_loss != OVERRIDDEN or self.staged is not None:
            self.warn_once(self.whole_loss_note)

    @property
    def chunking(self) -> Chunking | None:
        """See `PlacedModel.chunking`; what XLA compiles whole has no chunks."""
        return None if self.compiled_whole else super().chunking

    @property
    def compiled_whole(self) -> bool:
        """Whether XLA gets whole programs, though buckets could leave while they run."""
        apart = self.compute.inner_size > 1 or self.optimizer_config.level >= 2
        return self.jit_compile is True and not (apart or self.blocks or self.whole_loss)

    def resolved_xla(self, wanted: bool | str) -> bool | str:
        """What `jit_compile` is here: "auto" is True where Keras says so and programs are whole.

        Keras says so with a GPU, of models whose layers all support it. Where programs are cut
        (inner axes, stages, level 2 and more, recompute, a loss over the whole batch), it has to be
        asked for.
        """
        cut = self.compute.inner_size > 1 or self.topology.num_stages > 1
        cut = cut or self.optimizer_config.level >= 2 or bool(self.blocks or self.whole_loss)
        auto = wanted == "auto" and keras_xla.compiles_by_itself(self.model)
        self.xla_of_keras = auto and not cut
        return True if self.xla_of_keras else wanted

    def travel_notes(self) -> list[str]:
        """See `PlannedModel.travel_notes`."""
        if self.jit_compile is True and self.blocks:
            return [
                "jit_compile=True with recompute: numbers are the same, but XLA may merge what "
                "runs again with what ran before where it compiles both as one, and memory is not "
                "measured. Leave jit_compile out where memory is what counts."
            ]
        if not self.compiled_whole or super().chunking is None or self.staged is not None:
            return []
        return [
            "XLA compiles each replica's program whole at levels 0 and 1, so buckets leave when "
            "the backward pass has ended. Level 2 has chunks; jit_compile=False leaves XLA out."
        ]

    @property
    def over_inner_axes(self) -> bool:
        """Whether steps run over DTensor: slices have several devices, and no debugging."""
        return self.compute.inner_size > 1 and not self.model.run_eagerly

    def takes_batches(self, example: Any) -> bool:
        """Whether batches like this one can be taken before the graph of a step, to know sizes."""
        return not (has_composites(example) or self.model.run_eagerly)

    def looks_ahead(self) -> bool:
        """Whether `fit` looks rows of tables up a step ahead; never op by op.

        Raises:
            ValueError: It cannot: there is no next batch, or an update changes other rows too.
        """
        assert self.program is not None
        tables = self.program.tables.prefetched
        if not tables or self.model.run_eagerly:
            return False
        if self.model.steps_per_execution == 1:
            raise ValueError(
                "prefetch=True looks up rows of the next batch, which is known where several steps "
                "are one execution. Compile with steps_per_execution=8, say, or leave prefetch "
                f"out. Received: steps_per_execution=1, tables {[t.layer.path for t in tables]}"
            )
        rows = row_updates(self.model.optimizer, self.trained)
        rows -= {one.position for one in self.program.tables.penalized}
        if wrong := [one.layer.path for one in tables if one.trains and one.position not in rows]:
            raise ValueError(
                "prefetch=True is for tables of which a step changes only the rows that its batch "
                "looked up; of others nothing can be looked up ahead. Use kdist.lazy(...) or "
                "TableConfig(optimizer=...), or leave prefetch out. Received: "
                f"{type(self.model.optimizer).__name__}, which changes all rows of {wrong}"
            )
        return True

    def no_batch(self) -> None:
        """Does what Keras's step has done by the time it learns that the data has run out."""
        auto = self.jit_compile == "auto"  # what XLA compiled has done nothing by then
        xla = keras_xla.compiles_by_itself(self.model) if auto else self.jit_compile
        if self.update is not None and self.program is not None and not xla:
            connected = self.program.trained.connected
            # Once traced it serves every epoch.
            known, graph = self._without_batch or (None, None)
            if graph is None or known != (self.update, tuple(connected)):
                traced = tf.function(self.update.without_batch, autograph=False)
                graph = traced.get_concrete_function(connected)
                self._without_batch = (self.update, tuple(connected)), graph
            graph()

    def look_ups(self) -> Mapping[int, LookUp]:
        """See `PlannedModel.look_ups`; once the step is traced, what it does."""
        if self.program is None or not self.program.trained.connected:
            return super().look_ups()
        return self.program.trained.rows

    def works(self) -> list[Work]:
        """See `PlannedModel.works`; once the step is traced, what it does."""
        steps = [self.__dict__.get(name) for name in ("mesh_step", "plain_step")]
        for runner in (step.runner for step in steps if step is not None):
            if isinstance(runner, PipelineRunner) and runner.work is not None:
                return [runner.work]
            if (chunks := getattr(runner, "chunks", None)) is not None and chunks.works:
                return list(chunks.works)
        return super().works()

    @property
    def trained(self) -> Sequence[keras.Variable]:
        """The variables that training changes: those of when it began, frozen since or not."""
        if self.program is None or self.update is None:
            return super().trained
        return self.program.state.trainable

    @property
    def params(self) -> list[keras.Variable]:
        """See `PlacedModel.params`; of the steps that are made, if they are."""
        return super().params if self.program is None else [*self.program.state.params]

    def trainable(self) -> list[Stored]:
        """What is behind each trainable variable."""
        assert self.program is not None
        return self.entries_of(self.program.state.trainable)

    def stored_params(self) -> list[Stored]:
        """What is behind each parameter of the programs."""
        return self.entries_of(self.params)

    @functools.cached_property
    def plain_step(self) -> Step:
        """Steps on one device per slice."""
        assert self.program is not None
        if isinstance(self.program, PipelineProgram):
            backend = OneDevice(
                self.program.state,
                self.stored_params(),
                self.compute,
                self.topology,
                jit_compile=self.jit_compile is True,
                eager=self.model.run_eagerly,
            )
            return self._step(False, self._pipeline(self.program, backend))
        # Where layers see the whole batch, one device computes, and gathers for itself.
        chunking, xla = None if self.whole_batch else self.chunking, self.jit_compile is True
        if chunking is None and self.whole_loss and not self.model.run_eagerly:
            chunking = AROUND_LOSS
        given = self.program, self.stored_params(), self.compute
        if chunking is not None:
            chunks = ChunkedRunner(*given, chunking, self.bucket_keys, jit_compile=xla)
            return self._step(False, chunks)
        lacking = self.warn_once if self.xla_of_keras else None
        eager = self.model.run_eagerly
        whole = PlainRunner(*given, jit_compile=xla, lacking=lacking, eager=eager)
        return self._step(False, whole)

    @functools.cached_property
    def mesh_step(self) -> MeshStep:
        """Steps on one DTensor mesh per slice."""
        return self._step(True, self.mesh_runner())

    def _step(self, mesh: bool, runner: Runner) -> Any:
        staged = isinstance(self.program, PipelineProgram)
        return STEPS[mesh, staged, bool(self.whole_loss)](self, runner)

    def mesh_runner(self) -> MeshRunner | PipelineRunner:
        """Runs the programs over DTensor; made on first use."""
        if self._mesh_runner is None:
            if self.program is None:
                self.place()
                self.program = self.make_program()
            assert self.layouts is not None
            alltoall = self.config.enable_alltoall
            if isinstance(self.program, PipelineProgram):
                backend = InnerAxes(
                    self.program.state,
                    self.stored_params(),
                    self.layouts,
                    alltoall,
                    self.model,
                    jit_compile=self.jit_compile is True,
                    outlined=not self.program.blocks,
                )
                self._mesh_runner = self._pipeline(self.program, backend)
            else:
                whole, chunking = self.whole_loss, self.chunking
                self._mesh_runner = (MeshAroundLoss if whole else MeshRunner)(
                    self.program,
                    self.stored_params(),
                    self.layouts,
                    chunking=chunking or (AROUND_LOSS if whole else None),
                    keys=self.bucket_keys,
                    alltoall=alltoall,
                    jit_compile=self.jit_compile is True,
                    **self._wanted(),
                )
        return self._mesh_runner

    def _pipeline(self, program: PipelineProgram, backend: StageBackend) -> PipelineRunner:
        """Runs the stages on one kind of slice."""
        return PipelineRunner(
            program,
            self.stored_params(),
            self.compute,
            backend,
            lambda: self.recorder,
            chunking=Chunking(
                forward=True,
                free=self.optimizer_config.level >= 2,
                early=self.updates_early,
                keep=self.kept_gathered(),
            ),
            keys=self.bucket_keys,
            **self._wanted(),
        )

    def _wanted(self) -> dict[str, bool]:
        """What steps must return besides the loss."""
        metrics = keras_trainer.compiled_metrics(self.model) if self.model.compiled else None
        outputs = metrics is not None or overrides(self.model, "compute_metrics")
        return {"want_outputs": outputs or self.observed, "want_parts": self.observed}
