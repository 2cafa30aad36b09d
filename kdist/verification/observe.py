"""Runs a batch, on one device or over the mesh, through what users call, and notes what it gave.

The batch is as the model's steps get it. Where a model's own `fit` would prepare it again
(`preprocess_samples` of KerasHub's tasks), Keras's is called.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models, keras_trainer
from kdist.api.attached import attached
from kdist.api.custom_loop import training_pass
from kdist.api.preprocessed import method_of
from kdist.optimizer.wrappers import optimizers_of
from kdist.program.batch import leading
from kdist.program.loss_parts import added_up, compute_loss
from kdist.program.model_state import ModelState
from kdist.runtime.metrics import overrides
from kdist.verification.observed import Arrays, Observed

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ObservedPass:
    """What a forward and backward pass in training mode gave, name -> array.

    Attributes:
        output: The outputs, rows in the order of the batch; None where they cannot be had.
        loss: The loss, and each of its parts; of a `compute_loss` of the user's own none are known.
        gradient: Of each trainable weight that has one; None where none can be had.
    """

    output: Arrays | None
    loss: Arrays
    gradient: Arrays | None


def on_one_device(model: keras.Model, batch: tuple[Any, Any, Any], device: str) -> Observed:
    """What a plain model gives for a batch; the model trains one step on it.

    Args:
        model: A compiled model that is not parallelized.
        batch: (x, y, sample_weight) as tensors.
        device: The device to run on.
    """
    with tf.device(device):
        return _observe(model, batch, lambda: plain_pass(model, batch))


def over_mesh(model: keras.Model, batch: tuple[Any, Any, Any]) -> Observed:
    """What a parallelized, compiled model gives for a batch; it trains one step on it.

    Gradients are those before compression; weights show what the update made of them.
    """
    return _observe(model, batch, lambda: mesh_pass(model, batch))


def _observe(
    model: keras.Model, batch: tuple[Any, Any, Any], train: Callable[[], ObservedPass]
) -> Observed:
    own = overrides(model, "train_step")
    before = [as_array(v.value) for v in model.variables]
    output = (
        output_arrays(model, method_of(model, "predict_on_batch")(batch[0]))
        if keras_models.has_call(model)
        else {}
    )
    found = ObservedPass(None, {}, None) if own else train()
    for variable, value in zip(model.variables, before):
        variable.assign(value)
    logs = _fitted(model, batch) if own else _trained(model, batch)
    losses = {"loss", *(tracker.name for tracker in keras_trainer.loss_trackers(model))}
    state = ModelState.of(model)
    return Observed(
        output=output,
        training_output=found.output,
        loss={**found.loss, **{k: v for k, v in logs.items() if k in losses}},
        metric={k: v for k, v in logs.items() if k not in losses},
        gradient=found.gradient,
        state=by_path([*state.carried, *state.frozen]),
        weight=by_path(state.trainable),
        slot=slots_of(model),
    )


def slots_of(model: keras.Model) -> dict[str, np.ndarray]:
    """State of the optimizers that have updated something, by the attribute that has each.

    Keras, tracing a step, builds one that the step never applies too.
    """
    found: dict[str, np.ndarray] = {}
    for attribute, optimizer in optimizers_of(model).items():
        if optimizer.built and int(optimizer.iterations) > 0:
            inside = by_path(optimizer.variables)
            names = (path.removeprefix(f"{optimizer.name}/") for path in inside)
            found.update((f"{attribute}/{name}", one) for name, one in zip(names, inside.values()))
    return found


def _trained(model: keras.Model, batch: tuple[Any, Any, Any]) -> Arrays:
    """The logs of one training step."""
    logs = method_of(model, "train_on_batch")(*batch, return_dict=True)
    return {name: np.asarray(value) for name, value in logs.items()}


def _fitted(model: keras.Model, batch: tuple[Any, Any, Any]) -> Arrays:
    """The same of a step of the model's own, which takes a batch in the form that `fit` gives."""
    rows = int(leading(batch[0]).shape[0])
    x, y, sample_weight = batch
    steps: list[int] = []
    noted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
    given: dict[str, Any] = {"batch_size": rows, "shuffle": False, "verbose": 0}
    given |= {"sample_weight": sample_weight, "callbacks": [noted]}
    logs = method_of(model, "fit")(x, y, **given).history
    if not steps:
        raise RuntimeError(
            "fit ran no step: train_step raised StopIteration (an iterator had nothing left), "
            "which fit takes for the end of the data"
        )
    return {name: np.asarray(values[-1]) for name, values in logs.items()}


def as_compiled(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function run as the model's steps are: as a graph, op by op with `run_eagerly=True`.

    Not all layers run op by op: Keras's float8 does not.
    """

    def traced(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            keras_trainer.clear_losses(model)  # tensors of the graph

    return function if model.run_eagerly else tf.function(traced, autograph=False)


def predicted(model: keras.Model, x: Any) -> dict[str, np.ndarray]:
    """What a model, parallelized or not, predicts on the device in scope; nothing is written."""
    variables = ModelState.of(model).written

    def call(values: Sequence[Any], x: Any) -> Any:
        with keras.StatelessScope(list(zip(variables, values))):
            return model(x, training=False) if keras_models.takes_training(model) else model(x)

    values = [tf.identity(v.value) for v in variables]
    return output_arrays(model, as_compiled(model, call)(values, x))


def plain_pass(model: keras.Model, batch: tuple[Any, Any, Any]) -> ObservedPass:
    """A pass on one device, as Keras's own train step computes it; gradients unscaled."""

    def train(x: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            y_pred = call_for_training(model, x)
            loss, parts = loss_and_parts(model, x, y, y_pred, sample_weight)
            scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
        return y_pred, loss, parts, tape.gradient(scaled, [v.value for v in trainable])

    trainable = model.trainable_variables
    y_pred, loss, parts, found = as_compiled(model, train)(*batch)
    gradients = gradient_arrays(model, unscaled(model, found, loss.dtype))
    return ObservedPass(output_arrays(model, y_pred), loss_arrays(loss, parts), gradients)


def mesh_pass(model: keras.Model, batch: tuple[Any, Any, Any]) -> ObservedPass:
    """A pass over the mesh of a parallelized model; no gradient travels compressed.

    Args:
        model: The model; `observed` is set on what kdist attached to it.
        batch: (x, y, sample_weight) as tensors.
    """
    parallel = attached(model)
    found = training_pass(parallel, batch, compress=False)
    outputs = found.outputs()
    return ObservedPass(
        None if outputs is None else output_arrays(model, outputs),
        loss_arrays(found.loss, found.loss_parts(model)),
        gradient_arrays(model, found.gradients),
    )


def loss_and_parts(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> tuple[Any, dict[str, Any]]:
    """The loss of one device for its outputs, and its parts by name."""
    if overrides(model, "compute_loss"):
        return keras_trainer.compute_loss(model, x, y, y_pred, sample_weight, training=True), {}
    loss, parts = compute_loss(model, x, y, y_pred, sample_weight)
    return loss, added_up(parts)


def loss_arrays(loss: Any, parts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The loss and its parts as arrays."""
    return {name: as_array(value) for name, value in {"loss": loss, **parts}.items()}


def unscaled(model: keras.Model, found: Sequence[Any], dtype: Any) -> list[Any]:
    """Gradients without the loss scale that the optimizer asked for."""
    if model.optimizer is None:
        return list(found)
    factor = model.optimizer.scale_loss(tf.ones((), dtype))
    return [
        None if g is None else tf.convert_to_tensor(g) / tf.cast(factor, g.dtype) for g in found
    ]


def call_for_training(model: keras.Model, x: Any) -> Any:
    """The outputs in training mode."""
    return model(x, training=True) if keras_models.takes_training(model) else model(x)


def output_arrays(model: keras.Model, outputs: Any) -> dict[str, np.ndarray]:
    """Outputs by name: keys of a dict, else what Keras calls them, else by order."""
    flat = keras.tree.flatten_with_path(outputs)
    names = list(getattr(model, "output_names", None) or ())
    if isinstance(outputs, dict):
        names = ["/".join(map(str, path)) for path, _ in flat]
    elif len(names) != len(flat):
        names = [f"output {i}" if len(flat) > 1 else "output" for i in range(len(flat))]
    return {name: as_array(value) for name, (_, value) in zip(names, flat)}


def gradient_arrays(model: keras.Model, found: Sequence[Any]) -> dict[str, np.ndarray]:
    """Gradients by path of the variable; those of tables whole."""
    pairs = zip(model.trainable_variables, found)
    names = unique([v.path for v in model.trainable_variables])
    return {
        name: as_array(tf.convert_to_tensor(g))
        for name, (_, g) in zip(names, pairs)
        if g is not None
    }


def by_path(variables: Sequence[keras.Variable]) -> dict[str, np.ndarray]:
    """Whole values by path."""
    names = unique([v.path for v in variables])
    return {name: as_array(v.value) for name, v in zip(names, variables)}


def unique(names: Sequence[str]) -> list[str]:
    """Names, numbered where several are equal."""
    count = Counter(names)
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append(f"{name}#{seen[name]}" if count[name] > 1 else name)
        seen[name] += 1
    return found


def as_array(value: Any) -> np.ndarray:
    """A tensor as a NumPy array; 16-bit floats as float32."""
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    if isinstance(value, tf.RaggedTensor):
        value = value.to_tensor()
    value = tf.convert_to_tensor(value)
    if value.dtype in (tf.float16, tf.bfloat16):
        value = tf.cast(value, tf.float32)
    return value.numpy()
