"""What one virtual stage computes, as a pure function of flat lists of tensors.

The nodes of the model's graph are interpreted; no sub-model is built. On
the last virtual stage the loss belongs to it.

```
parameters, [from the stage before][masks][state][inputs of the model][loss data] ->
    [to the next stage][loss part][added][outputs] [masks][new state][other add-ons]
     the first two take a cotangent; of a loss over the whole batch, the first four do
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kdist._compat import keras_models, keras_seeds, keras_trainer
from kdist._compat.function_graphs import traced_anew
from kdist.program.forward_scope import ForwardScope
from kdist.program.logits import logits_of, received, sent_with
from kdist.program.loss import added_parts
from kdist.program.loss_parts import LossParts, collected
from kdist.program.program import Program
from kdist.stages.leaves import leaves, rebuild
from kdist.stages.stages import StagedModel
from kdist.stages.walk import walk
from kdist.storage.variables import Stored

import keras
import tensorflow as tf
from keras import ops


class Backend(Protocol):
    """What a stage runs on, as far as tracing it is concerned.

    Attributes:
        draws_alike: Whether an operation draws the same random numbers in the backward function.
        gather_first: Whether gradients are gathered before they are cut.
        entries: `Stored` of each of `ModelState.params`.
    """

    draws_alike: bool
    gather_first: bool
    entries: list[Stored]

    @property
    def functions(self) -> Any:
        """The class of the functions of a virtual stage."""

    @property
    def shares_memory(self) -> bool:
        """Whether the devices of a slice read what one of them made where it lies."""

    def devices(self, s: int) -> Sequence[str]:
        """Where slice `s` computes."""

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Around the trace of a stage."""

    def part(self, concrete: Any, late: Sequence[int] = (), turns: Mapping[str, int] = ...) -> Any:
        """A concrete function of a stage, to call with a slice and tensors."""

    def taken(self, variable: keras.Variable, value: Any) -> Any:
        """A variable's value as operations take it."""

    def like(self, value: Any, other: Any) -> Any:
        """A value laid out as another one."""

    def seen(self, outputs: Any) -> Any:
        """What the loss sees of the outputs."""

    def hands_on(self, tensor: Any) -> bool:
        """Whether a forward function may hand a tensor to the backward function."""

    def laid_out(self, gradient: Any, param: Any, position: int, by_batch: bool = False) -> Any:
        """The gradient of a trainable variable, given its value, as it is returned.

        If it is rows, `by_batch` tells whether they are for rows of the batch, one after the other.
        """


@dataclasses.dataclass
class StageInput:
    """What goes into one call of a virtual stage.

    Attributes:
        boundary: Tensors from the stage before, by name; None for an absent optional one. The
            logits of some are among them (`kdist.program.logits.sent_with`).
        masks: Keras masks of some of them, by name.
        state: Values of the state that it uses, by identity of the variable.
        inputs: The model's inputs that it uses, by name.
        loss: On the last virtual stage (y, sample_weight, term shares), if a loss is wanted.
        rows_share: Share of the whole batch's rows, float64; None where no loss is wanted.
    """

    boundary: Mapping[str, Any]
    masks: Mapping[str, Any]
    state: Mapping[int, Any]
    inputs: Mapping[str, Any]
    loss: Any = None
    rows_share: Any = None

    @property
    def parts(self) -> list[Any]:
        """The parts in the order of the flat inputs."""
        return [
            list(self.boundary.values()),
            list(self.masks.values()),
            list(self.state.values()),
            list(self.inputs.values()),
            self.loss,
            self.rows_share,
        ]

    @property
    def state_range(self) -> range:
        """Positions of the state among the flat inputs."""
        boundary, masks, state, *_ = (len(leaves(part)) for part in self.parts)
        return range(boundary + masks, boundary + masks + state)

    def flat(self) -> list[tf.Tensor]:
        """All tensors, those from the stage before first."""
        return leaves(self.parts)

    def filled(self, flat: Sequence[Any]) -> StageInput:
        """The same with other tensors."""
        parts = rebuild(self.parts, flat)
        names: list[Mapping[Any, Any]] = [self.boundary, self.masks, self.state, self.inputs]
        boundary, masks, state, inputs = (dict(zip(old, new)) for old, new in zip(names, parts))
        # A layer may return its input itself: who takes a Keras mask off one, takes it off both.
        first: dict[int, str] = {}
        for name, tensor in self.boundary.items():
            boundary[name] = boundary[first.setdefault(id(tensor), name)]
        return StageInput(boundary, masks, state, inputs, *parts[4:])


@dataclasses.dataclass
class StageOutput:
    """What comes out of one call of a virtual stage.

    Attributes:
        boundary: Tensors for the next stage, by name, with logits as in `StageInput`.
        masks: Keras masks of some of them.
        loss: Its part of the loss, if it has one.
        added: What its layers gave to `add_loss`, if the loss is one over the whole batch.
        terms: On the last virtual stage, its part of each compiled loss.
        outputs: There, the model's outputs, and the logits of some of them, by position.
        output_masks: And the mask, or None, of each flat one.
        state: New values of the state that it wrote, by identity of the variable.
        loss_parts: What its layers added to the loss, by name; see `kdist.program.loss_parts`.
    """

    boundary: dict[str, Any]
    masks: dict[str, Any]
    loss: Any = None
    added: list[Any] = dataclasses.field(default_factory=list)
    terms: list[Any] = dataclasses.field(default_factory=list)
    outputs: Any = None
    output_masks: list[Any] = dataclasses.field(default_factory=list)
    state: dict[int, Any] = dataclasses.field(default_factory=dict)
    loss_parts: LossParts = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> list[Any]:
        """The parts in the order of the flat outputs.

        The first two take cotangents; of a loss over the whole batch, the first four.
        """
        return [
            list(self.boundary.values()),
            self.loss,
            self.added,
            self.outputs,
            list(self.masks.values()),
            list(self.state.values()),
            self.terms,
            self.output_masks,
            list(self.loss_parts.values()),
        ]

    def flat(self) -> list[tf.Tensor]:
        """All tensors."""
        return leaves(self.parts)

    def targets(self, whole: bool) -> list[tf.Tensor]:
        """Those that may take a cotangent; they come first.

        Args:
            whole: See `StageBody.run`.
        """
        return leaves(self.parts[: 4 if whole else 2])

    @property
    def places_of_outputs(self) -> range:
        """Positions of the model's outputs among the flat ones."""
        before = len(leaves(self.parts[:3]))
        return range(before, before + len(leaves(self.outputs)))

    def filled(self, flat: Sequence[Any]) -> StageOutput:
        """The same with other tensors."""
        parts = rebuild(self.parts, flat)
        boundary, loss, added, outputs, masks, state, terms, output_masks, loss_parts = parts
        return StageOutput(
            dict(zip(self.boundary, boundary)),
            dict(zip(self.masks, masks)),
            loss,
            added,
            terms,
            outputs,
            output_masks,
            dict(zip(self.state, state)),
            dict(zip(self.loss_parts, loss_parts)),
        )


class StageBody:
    """One virtual stage of a model.

    Args:
        program: The model's program: knows its state and its loss.
        staged: The cut.
        virtual: Which virtual stage.
        backend: How values are laid out where it runs; see `kdist.runtime.one_device`.

    Attributes:
        params: Positions in `ModelState.params` of those that it uses, trainable ones first.
        carried: The other state that it uses.
        unmasked: Per node that has been traced, the tensors that it took the Keras mask off.
        adders: The layer that gave each value of `StageOutput.added`, once traced.
    """

    def __init__(
        self, program: Program, staged: StagedModel, virtual: int, backend: Backend
    ) -> None:
        self.program, self.backend = program, backend
        self.staged = staged
        self.virtual = virtual
        self.last = virtual == staged.schedule.virtual_stages - 1
        self.names = staged.partition.stages[virtual]
        self._asked = staged.asked_logits(virtual)
        used = {id(v) for v in self._used()}
        state = program.state
        self.params = [i for i, v in enumerate(state.params) if id(v) in used]
        self.carried = [v for v in state.carried if id(v) in used]
        self.unmasked: dict[str, set[str]] = {}
        self.adders: list[keras.layers.Layer | None] = []
        nodes = [staged.described.sources[name].node for name in self.names]
        self._layers = [layer for node in nodes for layer in keras_models.layers_of(node)]
        if self.last:
            self._layers.append(program.model)

    def _used(self) -> list[keras.Variable]:
        graph, described = self.staged.partition.graph, self.staged.described
        found = []
        for name in self.names:
            found += [described.variables[key] for key in graph.named[name].parameters]
            found += getattr(described.sources[name].node.operation, "metrics_variables", [])
        return found

    def given(
        self,
        boundary: Mapping[str, Any],
        masks: Mapping[str, Any],
        state: Mapping[int, Any],
        x: Mapping[str, Any],
        loss: Any,
        share: Any,
    ) -> StageInput:
        """Puts together what the stage is given.

        Args:
            boundary: What the stage before sent.
            masks: Its masks.
            state: Values of the state that the stage uses.
            x: The model's inputs by name.
            loss: For the last virtual stage; see `StageInput`.
            share: Share of the rows.
        """
        inputs = {name: x[name] for name in self.staged.inputs_of(self.virtual)}
        return StageInput(boundary, masks, state, inputs, loss if self.last else None, share)

    def run(
        self, params: Sequence[Any], given: StageInput, training: bool, whole: bool = False
    ) -> StageOutput:
        """Runs the stage on values.

        Args:
            params: Values of `self.params`.
            given: The rest.
            training: Training or inference.
            whole: The loss is one over the whole batch, which is computed outside the stages.
        """
        state = self.program.state
        variables = [state.params[i] for i in self.params]
        trainable = [v for i, v in zip(self.params, variables) if i < len(state.trainable)]
        before = {**given.state, **{id(v): p for v, p in zip(variables, params)}}
        taken = [(v, self.backend.taken(v, before[id(v)])) for v in (*variables, *self.carried)]
        scope = self.program.scope_of(taken, trainable)
        table = {**given.inputs, **received(given.boundary)}
        for name, mask in given.masks.items():
            keras_trainer.set_mask(table[name], mask)
        for layer in self._layers:
            keras_trainer.clear_losses(layer)
        # Keras's seed for all has to be there, for the trace to show that it is read.
        with scope, keras_seeds.drawing_from(self.program.unseeded), traced_anew({}):
            self.unmasked.update(walk(self.program, self.staged, self.virtual, table, training))
            result = self._loss(table, given, training)
            if whole:
                self._collect_losses(result, scope)
            else:
                self._add_losses(result, scope, given, training)
        for name in self.staged.writes(self.virtual):
            result.boundary[name] = table[name]
            mask = None if table[name] is None else keras_trainer.get_mask(table[name])
            if mask is not None:
                result.masks[name] = mask
        for name in self.staged.writes(self.virtual):
            if name in self._asked:
                result.boundary.update(sent_with(name, table[name]))
        for variable in (*variables, *self.carried):
            now = scope.current(variable)
            if now is not scope.given.get(id(variable)):
                result.state[id(variable)] = self.backend.like(now, before[id(variable)])
        return result

    def _loss(self, table: Mapping[str, Any], given: StageInput, training: bool) -> StageOutput:
        result = StageOutput({}, {})
        if not self.last:
            return result
        described = self.staged.described
        flat = [table[name] for name in described.outputs]
        outputs = keras_models.model_outputs(self.staged.functional, flat)
        result.outputs = outputs, logits_of(outputs)
        result.output_masks = self.program.masks_of(outputs)
        self._regularize(outputs)
        if given.loss is not None:
            y, sample_weight, shares = given.loss
            seen = self.backend.seen(outputs)
            value, terms = self.program.compiled_loss(
                seen, y, sample_weight, shares, given.rows_share
            )
            self.program.traced(training).note_counts(terms)
            result.loss, result.terms = value, [t.value for t in terms]
        return result

    def _regularize(self, outputs: Any) -> None:
        """Adds the activity regularizer of the model itself, as Keras's call of it does."""
        model = self.program.model
        if model.activity_regularizer is None:
            return
        for output in keras.tree.flatten(outputs):
            value = model.activity_regularizer(output)
            if output.shape.rank:
                value = ops.divide_no_nan(value, ops.cast(ops.shape(output)[0], value.dtype))
            model.add_loss(value)

    def _collect_losses(self, result: StageOutput, scope: ForwardScope) -> None:
        """Notes what layers gave to `add_loss`, as they gave it."""
        values = keras_trainer.add_loss_values(scope)
        self.adders = [keras_trainer.adder_of(self._layers, value) for value in values]
        result.added = [ops.sum(value) for value in values]

    def _add_losses(
        self, result: StageOutput, scope: ForwardScope, given: StageInput, training: bool
    ) -> None:
        """Adds what layers gave to `add_loss`, by the share of rows or summed where there are."""
        if given.rows_share is None:
            return
        means = functools.partial(self.program.gives_means, training)
        added = added_parts(scope, self._layers, given.rows_share, means)
        result.loss_parts = collected(added)
        values = [] if result.loss is None else [result.loss]
        values += [value for _, value in added]
        if values:
            result.loss = values[0] if len(values) == 1 else ops.sum(ops.stack(values))
