"""Runs a batch, on one device or over the mesh, through what users call, and notes what it gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kdist import _private, _private_models
from kdist.loop import gradients
from kdist.parallel import parallel_of
from kdist.program import ModelState
from kdist.verification.observed import Observed

import keras
import numpy as np
import tensorflow as tf

Gradients = Callable[[], Sequence[Any] | None]


def on_one_device(model: keras.Model, batch: tuple[Any, Any, Any], device: str) -> Observed:
    """What a plain model gives for a batch; the model trains one step on it.

    Args:
        model: A compiled model that is not parallelized.
        batch: (x, y, sample_weight) as tensors.
        device: The device to run on.
    """
    with tf.device(device):
        return _observe(model, batch, lambda: plain_gradients(model, batch))


def over_mesh(model: keras.Model, batch: tuple[Any, Any, Any]) -> Observed:
    """What a parallelized, compiled model gives for a batch; it trains one step on it.

    Gradients that travel compressed are not to be had; what the update made of them is.
    """
    parallel = parallel_of(model)
    assert parallel is not None
    compressed = parallel.config.compression is not None and parallel.topology.data_size > 1
    return _observe(model, batch, lambda: None if compressed else gradients(model, *batch)[1])


def _observe(model: keras.Model, batch: tuple[Any, Any, Any], found: Gradients) -> Observed:
    x, y, sample_weight = batch
    before = [as_array(v.value) for v in model.variables]
    output = output_arrays(model, model.predict_on_batch(x))
    values = found()
    for variable, value in zip(model.variables, before):
        variable.assign(value)
    gradient = None if values is None else gradient_arrays(model, values)
    logs = model.train_on_batch(x, y, sample_weight, return_dict=True)
    losses = {"loss", *(tracker.name for tracker in _private.loss_trackers(model))}
    state = ModelState.of(model)
    return Observed(
        output=output,
        loss={k: np.asarray(v) for k, v in logs.items() if k in losses},
        metric={k: np.asarray(v) for k, v in logs.items() if k not in losses},
        gradient=gradient,
        state=by_path(state.carried),
        weight=by_path(state.trainable),
        slot={} if model.optimizer is None else by_path(model.optimizer.variables),
    )


def predicted(model: keras.Model, x: Any) -> dict[str, np.ndarray]:
    """What a model, parallelized or not, predicts on the device in scope; nothing is written."""
    with keras.StatelessScope():
        outputs = model(x, training=False) if _private_models.takes_training(model) else model(x)
    return output_arrays(model, outputs)


def plain_gradients(model: keras.Model, batch: tuple[Any, Any, Any]) -> list[Any]:
    """Gradients on one device, as Keras's own train step computes them, unscaled.

    Returns:
        One gradient, or None, per trainable variable.
    """
    variables = model.trainable_variables
    x, y, sample_weight = batch
    with tf.GradientTape() as tape:
        y_pred = call_for_training(model, x)
        loss = _private.compute_loss(model, x, y, y_pred, sample_weight, training=True)
        scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
    found = tape.gradient(scaled, [v.value for v in variables])
    if model.optimizer is None:
        return list(found)
    factor = model.optimizer.scale_loss(tf.ones((), loss.dtype))
    return [
        None if g is None else tf.convert_to_tensor(g) / tf.cast(factor, g.dtype) for g in found
    ]


def call_for_training(model: keras.Model, x: Any) -> Any:
    """The outputs in training mode."""
    return model(x, training=True) if _private_models.takes_training(model) else model(x)


def output_arrays(model: keras.Model, outputs: Any) -> dict[str, np.ndarray]:
    """Outputs by name."""
    flat = keras.tree.flatten(outputs)
    names = list(getattr(model, "output_names", None) or ())
    if len(names) != len(flat):
        names = [f"output {i}" if len(flat) > 1 else "output" for i in range(len(flat))]
    return {name: as_array(value) for name, value in zip(names, flat)}


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
