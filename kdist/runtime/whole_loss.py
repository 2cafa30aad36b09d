"""Losses that only make sense over the whole batch, and the steps that compute them.

Nothing is known about how such a loss splits over replicas: it is computed once, on the first
slice's device, over the gathered outputs, with the weights and the state that one device has after
its forward pass. Gradients of the outputs go back to the slices, to be pulled through; those of the
weights that the loss itself uses join the slices' sums. Exact for any loss, at the cost of the
gather. There is one forward pass: slices run chunks, of which none is of both passes; stages keep
what their forward passes leave, for all micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_models, keras_trainer
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.program.batch import SplitBatch, join
from kdist.program.forward_scope import ForwardScope
from kdist.program.loss_parts import LossParts, compute_loss
from kdist.program.program import attach_masks
from kdist.program.recorded import with_their_logits
from kdist.program.state import combined
from kdist.program.step_result import SliceResult, State, StepResult
from kdist.program.vjp import differentiable
from kdist.runtime.called_by_loss import note, noting_calls
from kdist.runtime.loss_terms import OVERRIDDEN
from kdist.runtime.metrics import join_masks
from kdist.runtime.pipeline_step import PipelineStep
from kdist.runtime.runner_contract import (
    Begin,
    Collected,
    Coming,
    StagesRunner,
    WholeLossRunner,
    layer_weights,
)
from kdist.runtime.step import Step

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class _Pulled:
    """A loss and its gradients.

    Attributes:
        loss: The loss.
        parts: See `StepResult`; of the loss.
        state: What forward passes and loss have written.
        cotangents: Per part of the batch, the gradient of each flat output; None without one.
        added: The same of each `add_loss` value.
        once: By trainable variable, the gradient of what the loss itself reads.
    """

    loss: Any
    parts: LossParts
    state: State
    cotangents: Sequence[Sequence[Any]]
    added: Sequence[Sequence[Any]]
    once: dict[int, Any]


class WholeLossStep(Step):
    """The steps of a model whose loss is computed over the whole batch; see `Step`.

    The first slice's result has all parts of the loss, compiled losses among them.
    """

    runner: WholeLossRunner

    def _differentiated(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> StepResult:
        collected = self.runner.record(batch, self._coming(batch))
        back = self._pulled(collected, batch, scale)

        def with_once(source: SliceGradients, connected: Sequence[int]) -> Reduction:
            assert begin is not None
            return begin(source.joined(back.once), sorted({*connected, *back.once}))

        gradients = self.runner.pull_back(
            collected, back.cotangents, back.added, None if begin is None else with_once
        )
        pairs = zip(collected.results, gradients, strict=True)
        slices = [dataclasses.replace(one, gradients=g) for one, g in pairs]
        slices[0] = dataclasses.replace(slices[0], loss_parts=back.parts)
        return StepResult(back.loss, slices, back.once, back.state)

    def _coming(self, batch: SplitBatch) -> Coming | None:
        """What the loss will have gradients of, found in a graph that never runs.

        A backward pass is traced before there is a loss. None op by op, where tapes record.
        """
        if self.runner.by_tape:
            return None
        found: list[Coming] = []

        def loss() -> list[Any]:
            collected = self.runner.collect(batch, training=True)
            pulled = self._pulled(collected, batch, None)
            found.append(self.runner.coming(collected, pulled.cotangents, pulled.added))
            return []

        with self.runner.aside():
            tf.function(loss, autograph=False).get_concrete_function()
        return found[0]

    def _pulled(self, collected: Collected, batch: SplitBatch, scale: Any) -> _Pulled:
        """The loss, and its gradients."""
        outputs = [with_their_logits(part.outputs, part.masks) for part in collected.parts]
        added = [part.added for part in collected.parts]
        with tf.device(self.runner.devices[0]):
            state = self._state_after(batch, collected.results, training=True)
            params, carried = self._given(collected.given, state)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([t for t in keras.tree.flatten([outputs, added]) if _has_gradient(t)])
                tape.watch(params)
                loss, written, parts = self._loss(collected, (params, carried), training=True)
                target = loss if scale is None else loss * tf.cast(scale, loss.dtype)
            sources = [t if _has_gradient(t) else None for t in keras.tree.flatten(outputs)]
            made = [*sources, *keras.tree.flatten(added)]
            found = _gradient(tape, target, [*made, *params])
            found[: len(made)] = map(_dense, found[: len(made)])
        return _Pulled(
            loss=loss,
            parts=parts,
            state={**state, **written},
            cotangents=_take(found, [len(one) for one in outputs]),
            added=_take(found, [len(one) for one in added]),
            once={v: g for v, g in enumerate(found) if g is not None},
        )

    def _evaluated(self, batch: SplitBatch) -> StepResult:
        collected = self.runner.collect(batch, training=False)
        results = collected.results
        with tf.device(self.runner.devices[0]):
            state = self._state_after(batch, results, training=False)
            given = self._given(collected.given, state)
            loss, written, _ = self._loss(collected, given, training=False)
        return StepResult(loss, results, state={**state, **written})

    def _state_after(
        self, batch: SplitBatch, results: Sequence[SliceResult], training: bool
    ) -> State:
        """What the forward passes changed, as one device would have it."""
        changed = combined(self.program.state, *self._changed(results, training), batch)
        return {id(variable): (variable, value) for variable, value in changed}

    def _given(self, inputs: tuple[list[Any], list[Any]], state: State) -> tuple[list, list]:
        """Values of parameters and of carried state for the loss."""

        def now(variables: Sequence[keras.Variable], before: Sequence[Any]) -> list[Any]:
            pairs = zip(variables, before)
            return [state[id(v)][1] if id(v) in state else value for v, value in pairs]

        params, carried = inputs
        known = self.program.state
        return now(known.params, params), now(known.carried, carried)

    def _loss(
        self, collected: Collected, given: tuple[list, list], training: bool
    ) -> tuple[Any, State, LossParts]:
        """The model's loss over the whole batch, the variables that it writes, and its parts.

        Of a `compute_loss` of the user's own, no parts are known.
        """
        batch, parts_of = collected.batch, collected.parts
        x, y, sample_weight = batch.whole
        joined = join([part.outputs for part in parts_of], batch.counts)
        masks = join_masks([part.masks for part in parts_of], batch)
        outputs = attach_masks(_sized(joined, batch), _sized(masks, batch))
        scope = self.program.scope(*given)
        with scope:
            self._add_losses(scope, collected, training)
            if self.parallel.whole_loss == OVERRIDDEN:
                with noting_calls(keras_models.flat_layers(self.model)) as called:
                    loss = keras_trainer.compute_loss(
                        self.model, x, y, outputs, sample_weight, training
                    )
                if called and len(self.parallel.topology.devices) > 1:
                    self.parallel.warn_once(note(called))
                parts: LossParts = {}
            else:
                loss, parts = compute_loss(self.model, x, y, outputs, sample_weight, training)
        return loss, {key: (v, scope.current(v)) for key, v in scope.written.items()}, parts

    def _add_losses(self, scope: ForwardScope, collected: Collected, training: bool) -> None:
        """Gives `add_loss` values, combined over the parts, to the layers that added them."""
        weights_of = functools.cache(functools.partial(layer_weights, collected.batch))
        adders = self.program.traced(training).adders
        for layer, *values in zip(adders, *[p.added for p in collected.parts], strict=True):
            weights = weights_of(self.program.gives_means(training, layer))
            value = tf.add_n([v * tf.cast(w, v.dtype) for v, w in zip(values, weights)])
            if layer is not None:
                keras_trainer.add_loss_for(layer, value, scope)

    def _keep_state(self, batch: SplitBatch, result: StepResult, training: bool) -> None:
        for variable, value in result.state.values():
            variable.assign(value)


class WholeLossPipelineStep(WholeLossStep, PipelineStep):
    """The steps of a pipeline whose loss is computed over the whole batch."""

    runner: StagesRunner


def _has_gradient(made: Any) -> bool:
    """Whether an output can have one; it may be None."""
    return made is not None and differentiable(made)


def _dense(gradient: Any) -> Any:
    """A gradient; rows of an output, which the loss has looked up, as all of it."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _sized(tensors: Any, batch: SplitBatch) -> Any:
    """The whole batch's tensors; of known size where Keras would know it while tracing."""
    if batch.static_size is None:
        return keras.tree.map_structure(_of_unknown_size, tensors)
    # It is a tensor where a step over inner axes serves batches of all sizes.
    known = isinstance(batch.static_size, int)
    for leaf in keras.tree.flatten(tensors) if known else ():
        if isinstance(leaf, tf.Tensor):
            leaf.set_shape([batch.static_size, *leaf.shape[1:]])
    return tensors


def _of_unknown_size(tensor: Any) -> Any:
    """A tensor whose dim 0 is not known while tracing; stages over inner axes know their parts'."""
    if tf.executing_eagerly() or not isinstance(tensor, tf.Tensor) or tensor.shape[0] is None:
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _gradient(tape: tf.GradientTape, target: Any, sources: Sequence[Any]) -> list[Any]:
    """Gradient of each source; None for one that is None, and where one comes again.

    A tape gives a tensor that is two of the model's outputs its whole gradient twice, and who pulls
    back adds up what each output got.
    """
    there = {id(source): source for source in sources if source is not None}
    gradients = tape.gradient(target, list(there.values()))
    found = dict(zip(there, gradients, strict=True))
    return [None if source is None else found.pop(id(source), None) for source in sources]


def _take(values: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Takes lists of some sizes off the front of `values`."""
    taken = []
    for size in sizes:
        taken.append(values[:size])
        del values[:size]
    return taken
