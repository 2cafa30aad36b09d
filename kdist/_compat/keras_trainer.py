"""Keras internals of models in training: their steps, losses, metrics and masks.

Keras has no public way to do these things in 3.15; `tests/_compat/test_keras_trainer.py` fails by
name when one of them moves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import losses as keras_losses
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss, MetricsList
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

__all__ = [
    "TensorFlowTrainer",
    "add_loss_values",
    "apply_mask",
    "compiled_losses",
    "get_mask",
    "replaced_losses",
    "set_mask",
    "squeeze_or_expand_to_same_rank",
]

KEY = "_kdist_key"
"""The identity under which optimizers know a view (see `kdist.storage.variables`); it stays when
the variable's bytes move."""


def get_mask(tensor: Any) -> Any:
    """The Keras mask that travels on a tensor, or None."""
    return keras_backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a Keras mask to a tensor."""
    keras_backend.set_keras_mask(tensor, mask)


def current_value(variable: keras.Variable) -> Any:
    """The value that the running `StatelessScope` maps a variable to, or None outside of one."""
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def call_context() -> tuple[tuple[str, Any], ...]:
    """What the outermost layer in a call hands to those inside it, such as `training`."""
    context = global_state.get_global_attribute("current_call_ctx")
    given = {} if context is None else vars(context)
    return tuple(sorted((k, v) for k, v in given.items() if k != "entry_layer"))


def running_scope() -> Any:
    """The `StatelessScope` that is running, or None."""
    return get_stateless_scope()


def add_loss_values(scope: keras.StatelessScope) -> list[Any]:
    """What `add_loss` and activity regularizers collected in a scope."""
    return list(scope.losses)


def adder_of(layers: Iterable[keras.Layer], value: Any) -> keras.Layer | None:
    """Which of some layers gave a collected value to `add_loss`; None if none of them did."""
    return next((layer for layer in layers if id(value) in layer._loss_ids), None)


def add_loss_for(layer: keras.Layer | None, value: Any, scope: keras.StatelessScope) -> None:
    """Collects a value in a scope as if a layer, where it is known, had just added it."""
    scope.add_loss(value)
    if layer is not None:
        layer._loss_ids.add(id(value))


def clear_losses(layer: Any) -> None:
    """Makes a layer forget what it gave to `add_loss`, as Keras does when a model is called."""
    layer._clear_losses()


def regularization_losses(model: keras.Model) -> list[tuple[keras.Variable, Any]]:
    """Each regularized variable with its weight penalty, in the running scope."""
    regularized = [v for v in model.trainable_weights if v.regularizer is not None]
    return list(zip(regularized, model._get_regularization_losses(), strict=True))


def compiled_losses(model: keras.Model) -> list[CompileLoss.Loss]:
    """The flat list of (path, loss, weight, name) of a built `CompileLoss`; empty without one."""
    compiled = model._compile_loss
    # Not built where an overridden `compute_loss` does not use it.
    return list(compiled._flat_losses or ()) if compiled is not None else []


def loss_function(loss: keras.Loss) -> tuple[Any, dict[str, Any]]:
    """The function that a loss object wraps, and its options; (None, {}) if it wraps none."""
    wrapper = keras_losses.LossFunctionWrapper
    if not isinstance(loss, wrapper) or "call" in vars(loss):  # assigned to the object
        return None, {}
    if type(loss).call is not wrapper.call:
        return None, {}
    return loss.fn, dict(loss._fn_kwargs)


def compiled_loss(model: keras.Model) -> CompileLoss:
    """All compiled losses as one: called with targets, outputs, and perhaps sample weights."""
    return model._compile_loss


def loss_trackers(model: keras.Model) -> list[keras.metrics.Metric]:
    """The per-output loss metrics, one per compiled loss if there is more than one."""
    compiled = model._compile_loss
    return list(compiled.metrics) if compiled is not None else []


def losses_built(model: keras.Model) -> bool:
    """Whether the losses that `compile` got, if any, know the outputs they belong to."""
    return model._compile_loss is None or model._compile_loss.built


@contextlib.contextmanager
def noted_losses(model: keras.Model) -> Iterator[list[Any]]:
    """Meanwhile, notes what each compiled loss returns, in their order; they are built."""
    found: list[Any] = []
    compiled = model._compile_loss
    if compiled is None:
        yield found
        return

    def noted(loss: Any) -> Callable:
        def call(*args: Any) -> Any:
            found.append(loss(*args))
            return found[-1]

        return call

    before = compiled._flat_losses
    compiled._flat_losses = [entry._replace(loss=noted(entry.loss)) for entry in before]
    try:
        yield found
    finally:
        compiled._flat_losses = before


@contextlib.contextmanager
def replaced_losses(model: keras.Model, losses: Sequence[Any]) -> Iterator[None]:
    """Swaps the compiled losses, and silences their trackers, for the time of one trace."""
    compiled = model._compile_loss
    if compiled is None:
        yield
        return
    before, trackers = compiled._flat_losses, compiled._metrics
    compiled._flat_losses = [
        entry._replace(loss=loss) for entry, loss in zip(before, losses, strict=True)
    ]
    compiled._metrics = [None] * len(before)
    try:
        yield
    finally:
        compiled._flat_losses, compiled._metrics = before, trackers


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """The metric behind `logs["loss"]`."""
    return model._loss_tracker


def compiled_metrics(model: keras.Model) -> keras.metrics.Metric | None:
    """The `CompileMetrics` container, or None."""
    return model._compile_metrics


@contextlib.contextmanager
def only_metrics(container: keras.metrics.Metric, chosen: Set[int]) -> Iterator[None]:
    """Makes a built `CompileMetrics` meanwhile have the metrics of these identities alone."""

    def kept(entry: MetricsList | None) -> MetricsList | None:
        if entry is None:
            return None
        metrics = [metric for metric in entry.metrics if id(metric) in chosen]
        return MetricsList(metrics, output_name=entry.output_name) if metrics else None

    with replaced_metrics(container, kept):
        yield


def metric_calls(
    container: keras.metrics.Metric, y: Any, y_pred: Any, sample_weight: Any
) -> list[tuple[keras.metrics.Metric, Any, Any]]:
    """(metric, targets, predictions) of each update that a built `CompileMetrics` makes."""
    found: list[tuple[keras.metrics.Metric, Any, Any]] = []

    class Noted(MetricsList):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            found.extend((metric, y_true, y_pred) for metric in self.metrics)

    def noted(entry: MetricsList | None) -> MetricsList | None:
        return None if entry is None else Noted(entry.metrics)

    with replaced_metrics(container, noted):
        container.update_state(y, y_pred, sample_weight=sample_weight)
    return found


@contextlib.contextmanager
def replaced_metrics(
    container: keras.metrics.Metric, replace: Callable[[MetricsList | None], MetricsList | None]
) -> Iterator[None]:
    """Swaps the lists of metrics, one per output, of a built `CompileMetrics`."""
    names = ("_flat_metrics", "_flat_weighted_metrics")
    before = {name: getattr(container, name) for name in names}
    try:
        for name, entries in before.items():
            # Past Keras's tracking, which would keep every list that was ever set.
            object.__setattr__(container, name, [replace(entry) for entry in entries])
        yield
    finally:
        for name, entries in before.items():
            object.__setattr__(container, name, entries)


def wrapped_function(metric: keras.metrics.Metric) -> Callable | None:
    """The function of (y_true, y_pred) whose values a metric averages; None if it wraps none."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return None
    return functools.partial(metric._fn, **metric._fn_kwargs)


def tf_variable(variable: keras.Variable) -> tf.Variable:
    """The `tf.Variable` behind a Keras variable."""
    return variable._value


def write(variable: keras.Variable, value: Any) -> tf.Operation | None:
    """Assigns a variable that is no view; the operation that does it, None outside of graphs."""
    target = variable._value
    op = target.assign(tf.cast(value, target.dtype), read_value=False)
    return op if isinstance(op, tf.Operation) else None


def write_rows(variable: keras.Variable, rows: Any, values: Any) -> tf.Operation | None:
    """Assigns rows of a variable that is no view; returns as `write`.

    Args:
        variable: A variable.
        rows: Their numbers, each once.
        values: One value a row.
    """
    target = variable._value
    values = tf.cast(values, target.dtype)
    op = tf.raw_ops.ResourceScatterUpdate(resource=target.handle, indices=rows, updates=values)
    return op if isinstance(op, tf.Operation) else None


def inferring() -> bool:
    """Whether a graph is being traced for shapes alone, or with all values given from outside."""
    return bool(tf.inside_function()) and in_stateless_scope()


def is_stateless() -> bool:
    """Whether what variables are assigned is kept by a scope, and not written."""
    return bool(in_stateless_scope())


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Meanwhile, variables can be made and written, whatever is being traced."""
    before = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with tf.init_scope():
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", before)


def set_tf_variable(variable: keras.Variable, value: tf.Variable | None) -> None:
    """Replaces (or drops) the `tf.Variable` behind a Keras variable."""
    variable._value = value


def autocast(variable: keras.Variable, value: Any) -> Any:
    """Applies the running autocast scope, as `Variable.value` does."""
    return variable._maybe_autocast(value)


def rename(variable: keras.Variable, like: keras.Variable) -> None:
    """Gives a local variable the path of its logical one (weight-decay rules, Muon need it).

    A user's optimizer gets the `tf.Variable`, which a layer has named by that path as well.
    """
    variable._path = like.path
    variable._name = like.name
    if isinstance(variable._value, tf.Variable):
        variable._value._handle_name = f"{like.path}:0"


def call_flat(concrete: Any, inputs: list[Any], captures: list[Any]) -> Any:
    """Calls a concrete function with captures of the caller's choice (DTensors, on a mesh)."""
    return concrete._call_flat(inputs, captures)


def is_view(variable: keras.Variable) -> bool:
    """Whether a Keras variable has no `tf.Variable` of its own: see `kdist.storage.variables`."""
    return variable._value is None


def model_strategy(model: keras.Model) -> Any:
    """The `tf.distribute.Strategy` in whose scope a model was built, or None."""
    return model._distribute_strategy


def set_model_strategy(model: keras.Model, strategy: Any) -> None:
    """Replaces the strategy that Keras's trainer would use."""
    model._distribute_strategy = strategy


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """The model's loss, through its own `compute_loss`, whatever arguments that takes."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def class_weighted(dataset: tf.data.Dataset, weights: Mapping[int, float]) -> tf.data.Dataset:
    """A dataset with the weights of the classes of its labels, as `fit(class_weight=)` makes it."""
    return dataset.map(make_class_weight_map_fn(weights))


def weights_of_classes(y: Any, weights: Mapping[int, float]) -> np.ndarray:
    """A weight for each row of an array of labels, as `fit(class_weight=)` makes them."""
    return class_weight_to_sample_weights(y, weights)


def run_after(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Makes an operation of the graph being traced wait for others."""
    operation._add_control_inputs([op for op in others if op is not operation])


def runs_independently(operation: tf.Operation) -> bool:
    """Whether `run_independently` was called for an operation."""
    try:
        return operation.get_attr("_independent_side_effects")
    except ValueError:
        return False


def run_independently(operation: tf.Operation | None) -> None:
    """Takes a stateful operation of the graph being traced out of TensorFlow's automatic order.

    A `tf.function` runs everything that is stateful and has no variable (a clock, an assertion, a
    function with one inside) one after the other, in the order of the trace, on all devices.
    """
    if operation is not None:
        manager = operation.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(operation)


def function_of(model: keras.Model, step: Callable) -> Callable:
    """Keras's function of an iterator that takes as many steps on its batches as compiled for."""
    return model._make_function(step)
