"""Updates by the optimizers that a step of the user's own applies, the compiled one or others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kdist._compat import function_graphs, keras_applied, keras_optimizers
from kdist.api.applied_by_hand import by_weight
from kdist.api.sharded_optimizer import config_for
from kdist.calls.xla import refuse_within_xla
from kdist.graphs.write_order import writes_after_reads
from kdist.optimizer.update import DistributedUpdate
from kdist.optimizer.wrappers import unwrap
from kdist.runtime.step import WholeGradients

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel
    from kdist.program.program import Program


class OwnUpdates:
    """Updates weights on their owners' devices, whichever optimizer is applied to them.

    Each optimizer updates the weights that it was built for, or applied to first. Its state is
    spread as that of the compiled one is.

    Args:
        parallel: What kdist attached to the model.

    Attributes:
        running: Whether a step of the user's own is being traced, or run.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._program: Program | None = None
        self._applied_in: Program | None = None
        self._scales: Any = None  # was built before it was known what it is for
        self.running = False
        self._with_others: Sequence[OwnUpdates] = ()
        self._made: dict[int, tuple[Any, list[keras.Variable], DistributedUpdate]] = {}

    @property
    def beside(self) -> list[Any]:
        """Optimizers with updates of their own: not the compiled one where it is for all."""
        return [optimizer for optimizer, _, _ in self._made.values()]

    @property
    def made(self) -> list[DistributedUpdate]:
        """What updates weights by these optimizers."""
        return [update for _, _, update in self._made.values()]

    @property
    def began(self) -> bool:
        """Whether an optimizer has updated weights since the model's steps were made."""
        return self._applied_in is not None and self._applied_in is self._parallel.program

    @contextlib.contextmanager
    def applying(self, with_others: Sequence[OwnUpdates] = ()) -> Iterator[None]:
        """Meanwhile, optimizers that are applied to the model's weights do it over the mesh.

        One that the step builds has its state beside the trace, where its values can be read.

        Args:
            with_others: Those of all models that the step trains, which may share weights.
        """
        self.running, self._with_others = True, with_others
        apart = keras_applied.built_within(function_graphs.variables_apart)
        scaled = keras_applied.scaled_after(self._build_scale)
        try:
            with keras_applied.applied_by(self.apply), apart, scaled:
                yield
        finally:
            self.running = False

    def let_go(self) -> None:
        """What updates weights is made anew, in new steps; the optimizers' state stays."""
        for _, _, update in self._made.values():
            update.jobs.let_go()
        self._made.clear()

    def prepare(self, optimizer: Any, variables: list[keras.Variable]) -> None:
        """Has an optimizer update some weights from now on."""
        self._update(optimizer, variables)

    def apply(self, optimizer: Any, own: Callable, grads: Any, variables: Any) -> None:
        """Keras's `apply`.

        Args:
            optimizer: The optimizer.
            own: Its own `apply`.
            grads: Whole gradients, scaled where the optimizer scales losses.
            variables: What they are for; None for all that it updates.
        """
        if variables is None and self._is_compiled(optimizer):
            variables = self._parallel.model.trainable_variables
        gradients = list(grads)
        if variables is None or not self._are_mine(optimizer, list(variables)):
            own(gradients, variables)
            return
        by_variable = by_weight(optimizer, gradients, variables)
        if all(gradient is None for gradient in gradients):
            own(gradients, variables)  # which says so
            return
        if missing := [v.path for v, g in zip(variables, gradients, strict=True) if g is None]:
            self._parallel.warn_once(
                f"Gradients do not exist for variables {missing} in apply of {optimizer.name!r}. "
                "Does the loss depend on them? Of a cut weight, a tape finds a gradient by the "
                "variable, and not by its value."
            )
        refuse_within_xla(f"An update by {optimizer.name!r}")
        trained, update = self._update(optimizer, list(variables))
        self._applied_in = self._parallel.program
        whole = [by_variable.get(id(v)) for v in trained]
        entries = self._parallel.entries_of(trained)
        there = [n for n, gradient in enumerate(whole) if gradient is not None]
        with writes_after_reads():
            source = WholeGradients(whole, None, entries)
            update.apply(update.begin(source, there, compress=False))

    def _build_scale(self, optimizer: Any) -> None:
        """Builds the compiled optimizer before it scales a loss that a step is traced with.

        Not built, a `LossScaleOptimizer` gives the scale that it begins with, which the graph would
        hold on to while gradients are divided by the scale of each step.
        """
        parallel, model = self._parallel, self._parallel.model
        compiled = model.optimizer if model.compiled else None
        if not optimizer.built and optimizer is unwrap(compiled).loss_scale:
            with function_graphs.variables_apart():
                parallel.build_optimizer(compiled, model.trainable_variables)
            self._scales = compiled

    def _is_compiled(self, optimizer: Any) -> bool:
        """Whether the model is compiled with an optimizer."""
        model = self._parallel.model
        return bool(model.compiled) and optimizer is model.optimizer

    def _unknown(self, variables: Sequence[Any]) -> list[Any]:
        """Those of some variables that are no trainable weights of the model."""
        assert self._parallel.program is not None
        known = {id(v) for v in self._parallel.program.state.trainable}
        return [v for v in variables if id(v) not in known]

    def _are_mine(self, optimizer: Any, variables: Sequence[Any]) -> bool:
        """Whether variables are trainable weights of the model, all or none.

        Raises:
            ValueError: Some are, others are not, and no model of the step has all.
        """
        others = self._unknown(variables)
        if not all(one._unknown(variables) for one in (self, *self._with_others)):
            return not others  # a model that shares weights with this one may have all
        if others and len(others) < len(variables):
            raise ValueError(
                "An optimizer updates trainable weights of a parallelized model, or other "
                "variables: give others an optimizer of their own; a weight that was frozen when "
                "training began trains after compile, or in a new kdist.function. Received: "
                f"{getattr(others[0], 'path', others[0])!r} in apply of "
                f"{type(optimizer).__name__} {optimizer.name!r}"
            )
        return not others

    def _update(
        self, optimizer: Any, variables: list[keras.Variable]
    ) -> tuple[Sequence[keras.Variable], DistributedUpdate]:
        """The weights that an optimizer updates, and what does it; made on first use."""
        parallel = self._parallel
        assert parallel.program is not None
        if self._is_compiled(optimizer) and self._updates_all(optimizer, variables):
            every = parallel.program.state.trainable
            if optimizer is self._scales:
                _refuse_averages(optimizer, every, variables)
            parallel.updating()
            assert parallel.update is not None
            return every, parallel.update
        if self._program is not parallel.program:
            self._made.clear()
            self._program = parallel.program
        if id(optimizer) not in self._made:
            if not self._is_compiled(optimizer):  # see `_build_scale` of the compiled one
                _refuse_scale_of_trace(optimizer)
            with function_graphs.variables_apart():
                first = self._first(optimizer, variables)
                self._made[id(optimizer)] = (optimizer, first, self._new(optimizer, first))
        _, trained, update = self._made[id(optimizer)]
        if new := [v.path for v in variables if not any(v is one for one in trained)]:
            raise ValueError(
                "An optimizer of a step of one's own keeps to the weights that it was built for, "
                "or applied to first. Give others an optimizer of their own, or call "
                "optimizer.build(weights) with all before training. "
                f"Received: {type(optimizer).__name__} {optimizer.name!r}, applied to {new} too"
            )
        return trained, update

    def _updates_all(self, optimizer: Any, variables: Sequence[keras.Variable]) -> bool:
        """Whether the compiled optimizer is for all trainable weights, as in Keras's own step.

        It is once the compiled loss has trained with it. Not built, it is for those that it is
        applied to first.
        """
        program, update = self._parallel.program, self._parallel.update
        if update is not None or program is None:
            return True
        known = keras_optimizers.updated_by(optimizer) if optimizer.built else variables
        mine = {id(v) for v in known}
        return all(id(v) in mine for v in program.state.trainable)

    def _first(self, optimizer: Any, variables: list[keras.Variable]) -> list[keras.Variable]:
        """Trainable weights that an optimizer is for: those that it was built for, if it was."""
        built = keras_optimizers.updated_by(optimizer) if optimizer.built else []
        others = {id(v) for v in self._unknown(built)}  # frozen since, for example
        known = {id(v): v for v in built if id(v) not in others}
        return [*known.values()] if all(id(v) in known for v in variables) else variables

    def _new(self, optimizer: Any, variables: list[keras.Variable]) -> DistributedUpdate:
        parallel = self._parallel
        parallel.build_optimizer(optimizer, variables)
        spread = parallel.spread_where_stored(optimizer, variables)
        entries = parallel.entries_of(variables)
        config = config_for(optimizer, parallel.config.optimizer)
        update = DistributedUpdate(
            optimizer,
            entries,
            parallel.topology,
            spread.units,
            spread.keys,
            config,
            model=parallel,
        )
        parallel.tell_own_methods(update)
        return update


def _refuse_scale_of_trace(optimizer: Any) -> None:
    """Refuses a loss scale that was not there when the step was traced.

    Raises:
        ValueError: It is being traced.
    """
    scaled = unwrap(optimizer).loss_scale is not None
    if scaled and not optimizer.built and not tf.executing_eagerly():
        raise ValueError(
            "A LossScaleOptimizer that the model is not compiled with is built before the first "
            "step: until then it scales losses by a constant. Call optimizer.build(variables) with "
            "the weights that it will update. "
            f"Received: {type(optimizer).__name__} {optimizer.name!r}, not built"
        )


def _refuse_averages(
    optimizer: Any, trained: Sequence[keras.Variable], variables: Sequence[keras.Variable]
) -> None:
    """Refuses averages of weights that an optimizer which scales losses is not applied to.

    It was built for all trainable weights, and averages would be written into them.

    Raises:
        ValueError: It averages weights, and is applied to some of them.
    """
    mine = {id(v) for v in variables}
    others = [v.path for v in trained if id(v) not in mine]
    if others and unwrap(optimizer).inner.use_ema:
        raise ValueError(
            "An optimizer that scales losses averages all trainable weights of a parallelized "
            "model (use_ema=True), and the step applies it to some. Freeze the others before "
            "compile (trainable = False), or call optimizer.build(weights) with those it is for. "
            f"Received: {type(optimizer).__name__} {optimizer.name!r}, not applied to {others[:8]}"
        )
