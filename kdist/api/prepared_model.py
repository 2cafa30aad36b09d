"""Preparation of a model: its variables, its placed weights, its programs, its update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from kdist._compat import (
    function_graphs,
    keras_building,
    keras_models,
    keras_optimizers,
    keras_remat,
    keras_trainer,
)
from kdist.api import mirrored_scope
from kdist.api.applied_by_hand import hand_over
from kdist.api.fitted_model import FittedModel
from kdist.api.table_optimizers import check_table_optimizers
from kdist.config.parallel import ParallelConfig
from kdist.optimizer.local import sees_some_alone
from kdist.optimizer.update import DistributedUpdate
from kdist.optimizer.wrappers import optimizers_of, refuse_methods_of_objects
from kdist.runtime.keras_contract import (
    as_spec,
    build_by_step,
    has_composites,
    is_built,
    layers_built,
)
from kdist.runtime.loss_terms import joined_outputs, loss_terms
from kdist.storage.unborn import unborn_variables

import keras

if TYPE_CHECKING:
    from kdist.api.own_updates import OwnUpdates
    from kdist.api.parallelize import Parallel


class PreparedModel(FittedModel):
    """What steps need, made once, from the specs of a first batch.

    Attributes:
        batch_specs: Of (x, y, sample_weight), once trained.
        births: Whether weights are born as parts, and who is told of others; see `kdist.scope`.
        own_updates: Updates by steps of the user's own.
    """

    own_updates: OwnUpdates

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        super().__init__(model, config)
        self.batch_specs: Any = None
        self.births: Callable[[keras.Variable, str], None] | None = None

    @property
    def waits_for_batch(self) -> bool:
        """Whether the model is cut into stages by its first batch, which has not come."""
        pipeline = self.config.pipeline
        return pipeline is not None and pipeline.needs_batch and self.example_input is None

    def prepare(self, kind: str, example: Any) -> None:
        """Builds what the steps share, to train also the optimizer's state, on first use.

        Args:
            kind: "train", "test" or "predict".
            example: A batch, or the specs of one: (x, y, sample_weight).
        """
        mirrored_scope.refuse_scope()
        mirrored_scope.detach(self.model)
        self._leave_out_xla(example)
        with keras_remat.taken_back(self.model):
            self._build(kind, example)
        if kind == "train":
            self.batch_specs = keras.tree.map_structure(as_spec, example)
            sizes = (s.shape[:1] for s in keras.tree.flatten(self.batch_specs) if s is not None)
            self.batch_rows = next((n for (n,) in filter(None, sizes) if n), self.batch_rows)
        if kind != "predict" and self.loss_terms is None:
            self._look_at_loss(example)
        if self.program is None:
            self.place()
            self.spread_parameters(takes=kind == "train")
            self.program = self.make_program()
        if kind != "predict" and self.whole_loss:
            self.say_whole_loss()
        study = self.study_rows(training=kind == "train")
        if kind != "predict" and self.whole_loss:
            pipeline = self.config.pipeline
            cut = pipeline is not None and pipeline.micro_batches > 1
            joined = joined_outputs(self.model, self.loss_terms or ())
            study.refuse_squares(self.whole_loss, joined, micro_batches=cut)
        if kind == "train":
            self._make_update()

    def prepare_own(self, step: Callable, *data: Any) -> None:
        """Builds what steps of the user's own share, on first use.

        Args:
            step: The step, which builds layers that are not.
            *data: What it takes, or the specs of that.

        Raises:
            ValueError: It does not build them all.
        """
        mirrored_scope.refuse_scope()
        mirrored_scope.detach(self.model)
        for optimizer in optimizers_of(self.model).values():
            refuse_methods_of_objects(optimizer)
        if not layers_built(self.model):
            with keras_remat.taken_back(self.model), self._bearing():
                build_by_step(self.model, step, *data)
        self.place_for_own()
        if not self.user_steps:
            self.user_steps = True
            self.warn_without_effect()

    def place_for_own(self) -> None:
        """Places what steps of the user's own compute with, on first use."""
        if self.program is None:
            self.place()
            self.spread_parameters(compiled=True)
            self.program = self.make_program()

    def updating(self) -> None:
        """Makes what applies gradients, for a step of the model's own that has some, if need be."""
        if self.update is None and self.program is not None:
            trained = keras_models.flags_to_train(self.model, self.program.state.trainable)
            with keras_models.trainable_as(trained), function_graphs.variables_apart():
                self._build_optimizer()
                self._make_update()

    def _leave_out_xla(self, example: Any) -> None:
        """Goes on without XLA, which nobody asked for, where it cannot read the first batch."""
        if self.xla_of_keras and "plain_step" not in self.__dict__ and has_composites(example):
            self.xla_of_keras = False
            self.forget_steps(False)

    def forget_steps(self, jit_compile: bool | str) -> None:
        """See `SteppedModel`; what updates the weights is made anew too."""
        for update in (self.update, *self.own_updates.made):
            if update is not None:
                update.jobs.let_go()  # other models may have the same weights, and updates
        super().forget_steps(jit_compile)

    def prepare_optimizer(self) -> None:
        """Builds the compiled optimizer, and places its state, before there is a batch.

        The model is built.
        """
        self._build_optimizer()
        if self.program is None:
            self.place()
            self.spread_parameters()
            self.program = self.make_program()
        self._make_update()

    def _make_update(self) -> None:
        """Makes what applies gradients, on first use."""
        assert self.program is not None
        if self.update is not None or not self.program.state.trainable:
            return
        if self.model.optimizer is None:
            raise ValueError(
                "Training needs an optimizer. Call model.compile(optimizer=..., loss=...). "
                f"Received: model={self.model.name!r}, compiled with optimizer=None"
            )
        refuse_methods_of_objects(self.model.optimizer)
        check_table_optimizers(self.model)
        spread = self.spread()
        self.update = DistributedUpdate(
            self.model.optimizer,
            self.trainable(),
            self.topology,
            spread.units,
            spread.keys,
            self.optimizer_config,
            self.classes(),
            self.low_rank,
            self,
        )
        hand_over(cast("Parallel", self))
        self.warn_without_effect()
        self.tell_own_methods(self.update)

    def tell_own_methods(self, update: DistributedUpdate) -> None:
        """Warns of methods of optimizers that each device calls for what it updates."""
        for (leaf, _), local in zip(update.groups, update.jobs.local):
            if note := sees_some_alone(leaf, len(local)):
                self.warn_once(note)

    def _build_optimizer(self) -> None:
        if self.model.optimizer is not None:
            self.build_optimizer(self.model.optimizer, self.model.trainable_variables)

    @staticmethod
    def build_optimizer(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
        """Builds an optimizer as Keras does, but that what will be views is never whole."""
        if not optimizer.built:
            with (
                keras_optimizers.build_scope(optimizer),
                unborn_variables(lambda variable, why: None),
                keras_optimizers.built_without_values(),
            ):
                optimizer.build(variables)

    def _look_at_loss(self, example: Any) -> None:
        """Finds out how the compiled losses split; steps may have been made before, to predict."""
        before = self.whole_loss
        terms = loss_terms(self.model, keras.tree.map_structure(as_spec, example))
        self.loss_terms = terms
        if self.whole_loss != before:
            # Programs are cut around a loss over the whole batch: see `resolved_xla`.
            leaves_out = self.xla_of_keras and self.whole_loss
            self.xla_of_keras = self.xla_of_keras and not leaves_out
            self.forget_steps(False if leaves_out else self.jit_compile)
            self.loss_terms = terms

    def _build(self, kind: str, example: Any) -> None:
        """Creates missing variables: of layers, metrics, losses, and to train the optimizer's."""
        data = keras.tree.map_structure(as_spec, example)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.example_input = x
        if not is_built(self.model):
            with self._bearing():
                keras_trainer.keras_backend.compute_output_spec(self.model, x)
        if kind == "predict":
            return
        if not is_built(self.model) and self.whole_loss:
            keras_building.build_from_loss(self.model, data)
        if kind == "train":
            self._build_optimizer()
        keras_building.build_from_specs(self.model, data)

    def _bearing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.births is None else unborn_variables(self.births)
