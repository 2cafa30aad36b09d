"""`parallelize`: turns a Keras model into one that trains over a mesh, staying the same object.

Only this one model's methods that build the train, test and predict functions are replaced, on the
instance; all else (saving, cloning, `get_layer`, summary) is Keras's own code on its own class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import keras_trainer, keras_xla
from kdist.api import mirrored_scope, own_steps
from kdist.api.attached import ATTRIBUTE, parallel_of
from kdist.api.changed_weights import (
    follow_between_steps,
    follow_frozen,
    follow_fusion,
    follow_generator,
    follow_weights,
    take_up_weights,
)
from kdist.api.inside_layers import inside_layers, over_inner_axes
from kdist.api.own_methods import Arguments, refuse_own_functions
from kdist.api.own_updates import OwnUpdates
from kdist.api.prepared_model import PreparedModel
from kdist.api.table_optimizers import with_table_optimizers
from kdist.cluster.joining import naming_failures
from kdist.config.fusion import FusionConfig
from kdist.config.parallel import ParallelConfig
from kdist.display.progress import shown, silenced
from kdist.dtensor.retraced import CannotExpand
from kdist.graphs.instantiation import traced_without_collection, within
from kdist.plan.inside_layers import InsideTraffic
from kdist.runtime.keras_contract import example_of, is_built, peek, step_function
from kdist.runtime.mesh_step import BatchFunction
from kdist.runtime.step import Step

import keras
import tensorflow as tf

METHODS = (
    "compile",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "export",
    "load_weights",
    "save",
    "save_weights",
    "fit",
    "evaluate",
    "predict",
    "plan",
)
"""What a parallel model has of its own, on the instance."""
TASK_METHODS = ("load_task_weights",)
"""The same of what KerasHub's tasks alone have."""


def parallelize(model: keras.Model, config: ParallelConfig | None = None) -> keras.Model:
    """Makes a model train, evaluate and predict over a mesh, through plain Keras calls.

    Args:
        model: Any Keras model. If it is built, its weights are placed now, and wrong layouts are
            errors now; otherwise on first use.
        config: The mesh, the layouts and the rest. May be left out for a model built inside a
            `tf.distribute` strategy's scope, whose devices then are the data axis; see
            `mesh_from_strategy`.

    Returns:
        The same object.

    Raises:
        ValueError: The model is none of Keras, or parallel already; there is no configuration; a
            pattern of the layout map applies to no weight, or several to one; a dim does not divide
            by the axis that cuts it; or stages that cannot be.

    Example:
        >>> mesh = kdist.mesh(data=2, model=2)
        >>> config = kdist.ParallelConfig(mesh=mesh, layout_map={".*up/kernel": (None, "model")})
        >>> model = kdist.parallelize(build_model(), config)
        >>> model.compile("adam", "mse")
        >>> model.fit(x, y)
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`parallelize` takes a keras.Model. Wrap layers in one. Received: model={model!r}"
        )
    strategy = mirrored_scope.strategy_of(model)
    if config is None and strategy is not None:
        config = mirrored_scope.config_from(strategy)
    if not isinstance(config, ParallelConfig):
        raise ValueError(
            "`parallelize` takes a kdist.ParallelConfig(mesh=..., ...). "
            f"Received: config={config!r}"
        )
    if parallel_of(model) is not None:
        raise ValueError(
            "The model is parallelized already. Build a new one to change the mesh. "
            f"Received: model={model.name!r}"
        )
    if strategy is not None:
        mirrored_scope.check_devices(strategy, config.topology)
        if mirrored_scope.workers_of(strategy) > 1:
            mirrored_scope.detach(model)  # before Keras resets what the workers hold apart
    with naming_failures():
        Parallel(model, config).install()
    return model


class Parallel(PreparedModel):
    """kdist's side of one model: what Keras calls, over its placed weights and its steps.

    Attributes:
        live: The analysed step, by rows of its batch; see `kdist.report.memory`.
        verified: Whether the first batch was compared with one device, if that was asked for.
        unknown_to_optimizer: Weights that came and went since `compile`, if any did.
        compiled_with: What `compile` was given, by position and by name; None before.
    """

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        super().__init__(model, config)
        self.live: dict[int, Any] = {}
        self.verified = False
        self.unknown_to_optimizer: tuple[list[str], list[str]] | None = None
        self.compiled_with: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.own_updates = OwnUpdates(self)
        self._made: dict[str, dict[str, Callable]] = {}

    def install(self) -> None:
        """Attaches to the model and replaces the methods that make its functions."""
        model = self.model
        refuse_own_functions(model)
        own_steps.refuse_stages(self)
        if is_built(model) and not self.waits_for_batch and not tf.distribute.has_strategy():
            # First, so that a model whose layouts are refused is left as it was.
            self.place()
        object.__setattr__(model, ATTRIBUTE, self)
        keras_trainer.set_model_strategy(model, None)
        of_tasks = [name for name in TASK_METHODS if hasattr(type(model), name)]
        for name in (*METHODS, *of_tasks):
            object.__setattr__(model, name, getattr(self, name))
        if model.compiled:
            # Keras keeps no more than what it made of "auto".
            auto = model.jit_compile and keras_xla.compiles_by_itself(model)
            self.forget_functions(self.resolved_xla("auto" if auto else bool(model.jit_compile)))
            self.spread_parameters(takes=model.optimizer is not None)
        # It may have predicted, by a function that reads weights where they were.
        keras_xla.forget_functions(model)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`keras.Model.compile`; `jit_compile` then applies to kdist's programs.

        "auto" is what Keras makes of it, where XLA gets whole programs; see `resolved_xla`. Tables
        may have optimizers of their own. The model's class may have a `compile` of its own.
        """
        self.compiled_with = args, dict(kwargs)
        arguments = Arguments(self.model, "compile", args, kwargs)
        optimizer = arguments.get("optimizer", "rmsprop")
        several = with_table_optimizers(self.model, optimizer)
        if several is not optimizer and arguments.takes("optimizer"):
            arguments.named["optimizer"] = several
        with keras_xla.auto_left_open(self.model):
            arguments.call()
            wanted = self.model.jit_compile
        if wanted == keras_xla.LEFT_OPEN:
            wanted = keras_xla.save_as_auto(self.model)
        follow_weights(self, "compile")
        self.forget_functions(self.resolved_xla(wanted))
        self.unknown_to_optimizer = None
        if self.layouts is not None and is_built(self.model):
            self.place()
        self.spread_parameters(takes=self.model.optimizer is not None)
        for entry in self.entries.values():
            entry.settled = True

    def prepare_beside(self, optimizer: Any, variables: Sequence[keras.Variable]) -> None:
        """Builds an optimizer that steps of the user's own will apply, before there is a batch.

        Args:
            optimizer: The compiled one too, if it is not for all trainable weights.
            variables: Those that it will update.
        """
        self.place_for_own()
        self.own_updates.prepare(optimizer, list(variables))

    def set_fusion(self, fusion: FusionConfig) -> None:
        """Changes which gradients travel together; weights and optimizer state stay.

        Args:
            fusion: The settings from the next step on.

        Raises:
            ValueError: `overlap` differs from what the model was parallelized with.
        """
        if fusion.overlap != self.config.fusion.overlap:
            raise ValueError(
                "overlap changes how the model is cut, and is set before training: in "
                f"ParallelConfig. Received: fusion={fusion!r}"
            )
        trainable = [v.path for v in self.model.trainable_variables]
        planned = [] if self.program is None else [v.path for v in self.program.state.trainable]
        if self.program is not None and trainable != planned:
            raise ValueError(
                "Which weights train has changed since compile(). Call model.compile(...) first. "
                f"Received: {len(planned)} trainable weights then, {len(trainable)} now"
            )
        self.config = dataclasses.replace(self.config, fusion=fusion)
        self._forget_memory()
        follow_fusion(self)
        self._made.get("train", {}).clear()

    def forget_functions(self, jit_compile: bool | str) -> None:
        """Makes all functions anew on their next use, compiled as asked; state stays.

        What Keras calls stays too: a loop of `fit` may go on with it.
        """
        self.model.jit_compile = False
        self.forget_steps(jit_compile)
        self._forget_memory()
        for made in self._made.values():
            made.clear()

    def has_made(self, kind: str) -> bool:
        """Whether there is a function of a kind: "train", "test" or "predict"."""
        return getattr(self.model, f"{kind}_function") is not None and bool(self._made.get(kind))

    def _forget_memory(self) -> None:
        """The step that was analysed is no more."""
        self.live.clear()
        self.memory = ()

    def make_train_function(self, force: bool = False) -> None:
        """See `keras.Model.make_train_function`."""
        self._make("train", force)

    def make_test_function(self, force: bool = False) -> None:
        """See `keras.Model.make_test_function`."""
        self._make("test", force)

    def make_predict_function(self, force: bool = False) -> None:
        """See `keras.Model.make_predict_function`."""
        self._make("predict", force)

    def _make(self, kind: str, force: bool) -> None:
        """Gives the model a function that builds the real one from the first batch it sees."""
        attribute = f"{kind}_function"
        if own_steps.has_own_step(self.model, kind):
            own_steps.refuse_settings(self, own_steps.own_name(kind), trains=kind == "train")
        if self.layouts is not None:
            take_up_weights(self, kind)
        if getattr(self.model, attribute) is not None and not force:
            return
        if force and kind == "train" and self.layouts is not None:
            follow_frozen(self)  # for which Keras has its users call this
        made = self._made[kind] = {}

        def function(source: Any) -> Any:
            if kind == "train" and self.passes(source):
                return {}
            follow_between_steps(self, kind)
            if made:
                with naming_failures():
                    return made["inner"](source)
            if kind == "predict":
                example = example_of(source[0])
            else:
                source, example = peek(self.verify_first(source) if kind == "train" else source)
            told = silenced(self.model.run_eagerly), shown(f"making the {kind} step")
            with told[0], told[1], traced_without_collection(), naming_failures():
                made["inner"] = self._function(kind, example)
                return made["inner"](source)

        setattr(self.model, attribute, function)

    def verify_first(self, source: Any) -> Any:
        """Verifies the first batch if that is asked for; returns what yields the same batches."""
        if self.config.verify is None or self.verified:
            return source
        # Here, because it makes and parallelizes models.
        from kdist.verification.first_step import verify_first

        return verify_first(self, source)

    def _function(self, kind: str, example: Any) -> Callable:
        """What Keras calls: `kind` is "train", "test" or "predict"."""
        if own_steps.has_own_step(self.model, kind):
            return own_steps.own_function(self, kind, example)
        self.prepare(kind, example)
        no_batch = self.no_batch if kind == "train" else (lambda: None)
        over = self.over_inner_axes

        def plain() -> Callable:
            return getattr(self.plain_step, kind)

        def by_batch() -> BatchFunction:
            steps = self.mesh_step if over else self.plain_step
            return BatchFunction(steps, kind, plain, self.model, self.fall_back, no_batch)

        known = kind == "train" and self.takes_batches(example)
        sized = known and self.blocks.budget is not None
        if over or sized or (kind == "train" and self.looks_ahead()):
            function = by_batch()
            return function.predict if kind == "predict" else function
        if kind == "train" and not known:
            self.tell_barriers("batches are sparse or ragged, or steps run op by op")
        several = by_batch() if known and self.steps_together > 1 else None
        tell = self.tell_barriers if kind == "train" else (lambda where: None)
        traced = step_function(kind, plain(), self.model, no_batch, several, tell)
        return traced if self.model.run_eagerly else within(self.plain_step.prepared, traced)

    def predictor(self, x: Any) -> Callable[[Any], Any]:
        """What `predict` computes, as one graph: for files, which are loaded without kdist.

        Args:
            x: Specs of the model's input; a dim of None is any size.

        Returns:
            A function of the input, a structure of tensors.

        Raises:
            ValueError: The model runs on gathered weights, or cannot have one graph for all sizes.
        """
        with tf.init_scope():
            if self.layouts is not None:
                take_up_weights(self, "predict")
            self.prepare("predict", (x,))
            if not self.over_inner_axes:
                graph = tf.function(self.plain_step.predict, autograph=False)
                concrete = graph.get_concrete_function((x,))
                return lambda x: concrete(*tf.nest.flatten(x))
            graphs = self.mesh_step.by_shape(self.mesh_step.predict)
            try:
                serve = graphs.for_specs((x,), True, pads=lambda: self.rows_stay_apart(x))
            except CannotExpand as reason:
                raise ValueError(
                    "Parts can be kept where the program runs on parts, or for sizes that it is "
                    'made for. Use shards="gather", or give a Signature with inputs of known '
                    f"sizes. Received: {reason}"
                ) from reason
            return lambda x: serve(*tf.nest.flatten(x))

    def inside_layers(self, batch_size: int | None) -> Sequence[InsideTraffic] | None:
        """See `PlannedModel.inside_layers`."""
        return inside_layers(self, batch_size)

    def step_for(self, example: Any) -> Step:
        """The steps behind the functions for custom loops.

        In a loop, what is frozen does not train from the next step on; `fit` hears of it by
        `compile`, as Keras does.

        Args:
            example: A batch, to build from on first use; None if that has happened.

        Raises:
            ValueError: The model has no optimizer; or nothing has been built, and there is no batch
                to build from.
        """
        if not self.model.compiled or self.model.optimizer is None:
            raise ValueError(
                "A loop needs the model's loss and optimizer. Call model.compile(optimizer=..., "
                f"loss=...) first. Received: model={self.model.name!r}"
            )
        if example is not None:
            with tf.init_scope():
                follow_weights(self, "train")
                follow_frozen(self)
        # A checkpoint that was restored has made the update, before there was a batch.
        unseen = self.loss_terms is None and example is not None
        if self.update is None or unseen:
            if example is None:
                raise ValueError(
                    "Call kdist.gradients(model, x, y) before kdist.apply_gradients. "
                    f"Received: model={self.model.name!r}, which has not trained yet"
                )
            with tf.init_scope():  # maybe called while the user's own tf.function is traced
                follow_generator(self, "train")
                self.prepare("train", example)
        over = over_inner_axes(self)
        return self.mesh_step if over else self.plain_step
