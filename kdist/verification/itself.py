"""Comparing a model itself, in its own dtype, where no twin can be made of it.

One device calls the model as a pure function: its weights' values come in, nothing is written. The
mesh gives outputs and gradients; what that moves on (statistics, seeds) is put back. No update is
made, so that weights, slots and metrics need no putting back, and are not compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat import keras_trainer
from kdist.api.attached import attached
from kdist.api.parallelize import Parallel
from kdist.api.preprocessed import method_of
from kdist.program.forward_scope import ForwardScope
from kdist.program.model_state import ModelState
from kdist.verification.calm import calm
from kdist.verification.observe import (
    as_array,
    as_compiled,
    by_path,
    call_for_training,
    gradient_arrays,
    loss_and_parts,
    loss_arrays,
    mesh_pass,
    output_arrays,
    predicted,
    unique,
    unscaled,
)
from kdist.verification.observed import Observed, compare_runs
from kdist.verification.study import Study
from kdist.verification.trial import Request, Trial, excused, named, study_of
from kdist.verification.twin import batch_in

import keras
import numpy as np
import tensorflow as tf


def run_itself(request: Request, *, quiet: bool = False) -> Trial:
    """Compares one device with the mesh, on the model itself.

    Args:
        request: What to compare, in the model's own dtype policy.
        quiet: Random layers draw nothing, `BatchNormalization` uses the given statistics. The
            model's steps are then traced anew, here and when it trains next.
    """
    model, parallel = request.model, attached(request.model)
    batch = batch_in("float32" if request.policy != "float64" else "float64", request.batch)
    parallel.step_for(batch)  # builds losses and metrics
    random, statistics = excused(model, parallel, batch[0])
    layers = named(model, random + statistics) if quiet else []
    with _unchanged(model) as restore, _observed(layers, parallel):
        with tf.device(request.config.topology.devices[0]):
            one = _alone(model, batch)
        mesh = _over_mesh(model, batch, restore)
        restore()
        comparison = compare_runs(one, mesh, request.tolerance)
        found = Study()
        if not comparison.ok:
            found = study_of(model, batch[0], parallel, request.tolerance)
    notes = tuple(parallel.fallbacks)
    return Trial(comparison, (one, mesh), found, random, statistics, notes)


@contextlib.contextmanager
def _unchanged(model: keras.Model) -> Iterator[Any]:
    """Gives a function that puts back a model's variables that changed, and calls it at the end."""
    # Keras's `variables` have no metrics: those of layers, and of single outputs' losses, which
    # a loss over the whole batch moves.
    metrics = [v for one in keras_trainer.loss_trackers(model) for v in one.variables]
    each = (*model.variables, *ModelState.of(model).carried, *metrics)
    variables = list({id(v): v for v in each}.values())
    before = [(v, as_array(v.value)) for v in variables]
    exact = [tf.identity(v.value) for v in variables]

    def restore() -> None:
        for (variable, value), whole in zip(before, exact):
            if not np.array_equal(as_array(variable.value), value):
                variable.assign(whole)

    try:
        yield restore
    finally:
        restore()


@contextlib.contextmanager
def _observed(layers: list[keras.layers.Layer], parallel: Parallel) -> Iterator[None]:
    """Meanwhile, steps return all that is compared, and some layers behave as in inference.

    Programs that are traced for this alone are forgotten: those with other layers, and those over
    inner axes and in stages, which otherwise leave out what a step does not need.
    """
    classes: list[Any] = [type(layer) for layer in layers]
    leaves_out = parallel.over_inner_axes or parallel.staged is not None
    anew = bool(layers) or leaves_out
    if anew:
        parallel.forget_functions(parallel.jit_compile)
    parallel.observed = True
    calm(layers)
    try:
        yield
    finally:
        for layer, own in zip(layers, classes):
            layer.__class__ = own
        parallel.observed = False
        if anew:
            parallel.forget_functions(parallel.jit_compile)


def _alone(model: keras.Model, batch: tuple[Any, Any, Any]) -> Observed:
    """What one device gives for a batch, from the weights' whole values."""
    state = ModelState.of(model)
    trainable, others = state.trainable, (*state.carried, *state.frozen)
    given = [[tf.identity(v.value) for v in of] for of in (trainable, others)]

    def train(params: list[Any], rest: list[Any], batch: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        x, y, sample_weight = batch
        values = [*zip(trainable, params), *zip(others, rest)]
        with tf.GradientTape() as tape:
            tape.watch(params)
            with (scope := ForwardScope(values, trainable)):
                y_pred = call_for_training(model, x)
                loss, parts = loss_and_parts(model, x, y, y_pred, sample_weight)
                scaled = model.optimizer.scale_loss(loss)
        now = [scope.get_current_value(v) for v in state.carried]
        return y_pred, loss, parts, tape.gradient(scaled, params), now

    y_pred, loss, parts, found, now = as_compiled(model, train)(*given, batch)
    names = unique([v.path for v in state.carried])
    return Observed(
        output=predicted(model, batch[0]),
        training_output=output_arrays(model, y_pred),
        loss=loss_arrays(loss, parts),
        metric={},
        gradient=gradient_arrays(model, unscaled(model, found, loss.dtype)),
        state={name: as_array(value) for name, value in zip(names, now)},
    )


def _over_mesh(
    model: keras.Model, batch: tuple[Any, Any, Any], restore: Callable[[], None]
) -> Observed:
    """What the mesh gives; statistics and seeds move on."""
    output = output_arrays(model, method_of(model, "predict_on_batch")(batch[0]))
    restore()  # layers' own metrics see predictions too
    found = mesh_pass(model, batch)
    return Observed(
        output=output,
        training_output=found.output,
        loss=found.loss,
        metric={},
        gradient=found.gradient,
        state=by_path(ModelState.of(model).carried),
    )
