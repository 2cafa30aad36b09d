"""Functions for writing one's own training loop over a parallelized model.

They are what `fit` uses. All values are whole: gradients come summed over replicas and assembled
over inner axes, in the order of `model.trainable_variables`; those of tables as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kdist.api.applied_by_hand import apply_whole
from kdist.api.attached import attached
from kdist.api.parallelize import Parallel
from kdist.dtensor.retraced import CannotExpand
from kdist.program.batch import split
from kdist.program.training_pass import TrainingPass
from kdist.runtime.runner_contract import row_shares

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel

unconverted = tf.autograph.experimental.do_not_convert
"""For what users call in a `tf.function`: AutoGraph would rewrite all of kdist (20 s, once)."""


@unconverted
def gradients(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None
) -> tuple[Any, list[Any]]:
    """Loss and gradients of one global batch, computed over the mesh.

    Statistics of layers (BatchNormalization) and seeds move on, as in `fit`; weights do not.
    Gradients travel as in `fit`: in its buckets, and with `ParallelConfig(compression=...)`
    compressed, so that what is returned is what arrived, and the next call sends what this one did
    not; unless a gradient is infinite or NaN.

    Args:
        model: A parallelized, compiled model.
        x: Inputs, a structure of arrays or tensors `(rows of the global batch, ...)`.
        y: Targets, the same.
        sample_weight: Weights of examples, `(rows,)`, or a structure of them as `fit` takes it.

    Returns:
        The loss, a float32 scalar, before loss scaling; and one whole gradient per trainable
        variable, of its shape and dtype, as a `tf.GradientTape` on one device gives it:
        `tf.IndexedSlices` for a table whose rows are looked up, None where the loss does not depend
        on the variable.

    Raises:
        ValueError: The model is not parallelized, or not compiled; or, with `verify="first_step"`,
            the first call is in a graph.
        kdist.VerificationError: That first batch is not what one device computes.

    Example:
        >>> loss, grads = kdist.gradients(model, x, y)
        >>> grads = [g if g is None else tf.clip_by_norm(g, 1.0) for g in grads]
        >>> kdist.apply_gradients(model, grads)
    """
    parallel, data = attached(model), (x, y, sample_weight)
    _verify_first(parallel, data)
    found = training_pass(parallel, data)
    return found.loss, found.gradients


def training_pass(parallel: Parallel, data: Any, compress: bool = True) -> TrainingPass:
    """One forward and backward pass over the mesh; see `gradients`.

    Args:
        parallel: Of a compiled model.
        data: A batch: (x, y, sample_weight).
        compress: Whether gradients travel compressed, where that was asked for.
    """
    try:
        return parallel.step_for(data).gradients(data, compress)
    except CannotExpand as reason:
        text = f"DTensor cannot run {reason}. The model runs on gathered weights instead."
        if reason.of_batch:
            parallel.warn_once(f"kdist.gradients: {text}")
        else:
            parallel.fall_back(text)
        return parallel.plain_step.gradients(data, compress)


def _verify_first(parallel: Parallel, data: Any) -> None:
    """Verifies the loop's first batch, if the configuration asks for it."""
    if parallel.config.verify is None or parallel.verified:
        return
    if not tf.executing_eagerly():
        raise ValueError(
            "The first batch of a loop is verified before anything is traced. Call "
            "kdist.gradients(model, x, y) once outside of tf.function, or set verify=None. "
            f"Received: a call in a graph, verify={parallel.config.verify!r}"
        )
    parallel.verify_first([data])


@unconverted
def apply_gradients(model: keras.Model, gradients: Sequence[Any]) -> None:
    """Updates the weights, on their owners' devices, with the compiled optimizer.

    Args:
        model: A parallelized, compiled model on which `kdist.gradients` was called.
        gradients: One whole gradient per trainable variable, in their order, of the variable's
            shape, or `tf.IndexedSlices`; None leaves a weight as it is.

    Raises:
        ValueError: The number of gradients is not that of the trainable variables, or all are None.

    Example:
        >>> loss, grads = kdist.gradients(model, x, y)
        >>> kdist.apply_gradients(model, grads)
    """
    apply_whole(attached(model), gradients)


@unconverted
def reduce(model: keras.Model, function: Callable, *data: Any, op: str = "mean") -> Any:
    """Calls a function on every replica's rows, on its device, and combines the results.

    Args:
        model: A parallelized model: says over which devices.
        function: Takes a replica's rows of `data` and returns a structure of tensors, of the same
            shapes on every replica.
        *data: Structures of tensors `(rows of the global batch, ...)`.
        op: "mean" (weighted by rows) or "sum".

    Returns:
        The combined structure. A mean of integers is of Keras's float type.

    Raises:
        ValueError: `op` is neither "mean" nor "sum".

    Example:
        >>> y_pred = model.predict(x)
        >>> error = kdist.reduce(model, lambda a, b: tf.reduce_mean(abs(a - b)), y, y_pred)
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"op is 'mean' or 'sum'. Received: op={op!r}")
    topology = attached(model).topology
    tensors = keras.tree.map_structure(tf.convert_to_tensor, list(data))
    batch = split(tensors, None, None, topology.data_size)
    weights = (
        row_shares(batch) if op == "mean" else [tf.cast(n > 0, tf.float64) for n in batch.counts]
    )
    results = []
    for one, (rows, _, _), weight in zip(topology.slices, batch.parts, weights):
        with tf.device(one.devices[0]):

            def scale(value: Any, weight: Any = weight) -> Any:
                tensor = tf.convert_to_tensor(value)
                if op == "mean" and not (tensor.dtype.is_floating or tensor.dtype.is_complex):
                    tensor = tf.cast(tensor, keras.config.floatx())
                return tensor * tf.cast(weight, tensor.dtype)

            results.append(keras.tree.map_structure(scale, function(*rows)))
    return keras.tree.map_structure(lambda *parts: tf.add_n(list(parts)), *results)
