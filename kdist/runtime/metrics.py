"""Metrics that equal a single-device run.

A metric takes one of two routes. What is known to add up over rows (Keras's own metrics, and
functions whose values each depend on one row) is fed the replicas' parts one after the other,
through one state, as if one device had seen them in order. The heavy part of an update (an argmax,
a comparison with 200 thresholds) does not depend on the state, so the runtime still does it on all
devices at once; only the additions form a chain.

Everything else (a dice coefficient, a root of a mean, a metric that counts its updates) may depend
on which rows it sees together: it is updated once per batch, over the gathered outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.program.batch import SplitBatch, join
from kdist.program.program import attach_masks
from kdist.rows import NotStudied, RowDependence, study

import keras
import tensorflow as tf

STREAMING = frozenset(
    one
    for one in vars(keras.metrics).values()
    if isinstance(one, type) and issubclass(one, keras.metrics.Metric)
)
"""Keras's own metrics: their state adds up over rows, if the function adds up that some wrap."""


def overrides(model: keras.Model, method: str) -> bool:
    """True if the user defines `method`: in the model's class, or on the object alone."""
    own = getattr(type(model), method) is not getattr(keras.Model, method)
    return own or method in vars(model)


class MetricUpdates:
    """Updates the compiled metrics of one model from the replicas' outputs.

    Args:
        model: The compiled model.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._known: dict[Any, bool] = {}

    def update(
        self,
        batch: SplitBatch,
        outputs: Sequence[Any],
        masks: Sequence[Sequence[Any]],
        devices: Sequence[str],
    ) -> dict[str, Any]:
        """Updates the metrics and returns the logs of the step.

        Args:
            batch: The batch that the replicas saw.
            outputs: Model outputs per replica.
            masks: Keras masks of the flat outputs, per replica.
            devices: The device on which each replica's outputs are.

        Returns:
            What `compute_metrics` returns on one device.
        """
        if overrides(self.model, "compute_metrics"):
            x, y, sample_weight = batch.whole
            whole = _gathered(batch, outputs, masks, devices)
            return self.model.compute_metrics(x, y, whole, sample_weight)
        container = keras_trainer.compiled_metrics(self.model)
        if container is not None:
            self._update(container, batch, outputs, masks, devices)
        return self.model.get_metrics_result()

    def _update(
        self,
        container: keras.metrics.Metric,
        batch: SplitBatch,
        outputs: Sequence[Any],
        masks: Sequence[Sequence[Any]],
        devices: Sequence[str],
    ) -> None:
        chained = self._additive(container, batch, outputs[0]) if len(outputs) > 1 else set()
        every = {id(metric) for metric in container.metrics}
        if chained:
            with keras_trainer.only_metrics(container, chained):
                _chain(container, batch, outputs, masks, devices)
        if every - chained:
            _, y, sample_weight = batch.whole
            with keras_trainer.only_metrics(container, every - chained), tf.device(devices[0]):
                whole = _gathered(batch, outputs, masks, devices)
                container.update_state(y, whole, sample_weight=sample_weight)

    def _additive(
        self, container: keras.metrics.Metric, batch: SplitBatch, outputs: Any
    ) -> set[int]:
        """Identities of the metrics that add up over rows in every use that `compile` makes."""
        _, y, sample_weight = batch.parts[0]
        calls = keras_trainer.metric_calls(container, y, outputs, sample_weight)
        for metric, y_true, y_pred in calls:
            key = (id(metric), _spec(y_true), _spec(y_pred))
            if key not in self._known:
                self._known[key] = adds_up(metric, y_true, y_pred)
        coupled = {
            id(metric)
            for metric, y_true, y_pred in calls
            if not self._known[id(metric), _spec(y_true), _spec(y_pred)]
        }
        return {id(metric) for metric, _, _ in calls} - coupled


def adds_up(metric: keras.metrics.Metric, y_true: Any, y_pred: Any) -> bool:
    """Whether it is known that updates with parts of a batch equal one with the whole batch.

    Args:
        metric: A compiled metric.
        y_true: Targets that it gets, or their spec.
        y_pred: Predictions that it gets, or their spec. Of rank 1 they may be taken for one row
            (a mean over the last dim is one over the batch), so nothing is known.
    """
    if type(metric) not in STREAMING or y_true is None or y_true.shape.rank is None:
        return False
    if (y_pred.shape.rank or 0) < 2:
        return False
    function = keras_trainer.wrapped_function(metric)
    return function is None or _row_by_row(function, _as_spec(y_true), _as_spec(y_pred))


def _row_by_row(function: Callable, *specs: tf.TensorSpec) -> bool:
    """Whether each value of a function is known to depend on one row alone."""
    try:
        found = study(function, *specs)
    except NotStudied:
        return False
    return all(flow is RowDependence.ROWS for flow in found.outputs)


def _as_spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def _spec(tensor: Any) -> Any:
    """What a decision about a tensor depends on: all but its number of rows."""
    if tensor is None or tensor.shape.rank is None:
        return None
    return tensor.shape.rank, *tensor.shape[1:], tensor.dtype


def _gathered(
    batch: SplitBatch,
    outputs: Sequence[Any],
    masks: Sequence[Sequence[Any]],
    devices: Sequence[str],
) -> Any:
    """The outputs for the whole batch, with their masks, on the first replica's device."""
    with tf.device(devices[0]):
        return attach_masks(join(list(outputs), batch.counts), join_masks(masks, batch))


def join_masks(masks: Sequence[Sequence[Any]], batch: SplitBatch) -> list[Any]:
    """Joins the replicas' masks, output by output."""
    return [
        None if column[0] is None else join(list(column), batch.counts) for column in zip(*masks)
    ]


def _chain(
    container: keras.metrics.Metric,
    batch: SplitBatch,
    outputs: Sequence[Any],
    masks: Sequence[Sequence[Any]],
    devices: Sequence[str],
) -> None:
    """Feeds the replicas' parts through one state, one after the other."""
    variables = container.variables
    state = [tf.convert_to_tensor(v.value) for v in variables]
    for r, device in enumerate(devices):
        with tf.device(device):
            scope = keras.StatelessScope(list(zip(variables, state)))
            _, y, sample_weight = batch.parts[r]
            with scope:
                predicted = attach_masks(outputs[r], masks[r])
                container.update_state(y, predicted, sample_weight=sample_weight)
            new = [scope.get_current_value(v) for v in variables]
            if not batch.full:
                used = batch.counts[r] > 0
                new = [tf.where(used, a, b) for a, b in zip(new, state)]
        state = new
    for variable, value in zip(variables, state):
        variable.assign(value)


def track_loss(model: keras.Model, batch: SplitBatch, loss: Any, terms: Sequence[Any]) -> None:
    """Updates `loss`, and the per-output losses if there are several, as Keras does."""
    rows = batch.size
    keras_trainer.loss_tracker(model).update_state(loss, sample_weight=rows)
    for tracker, value in zip(keras_trainer.loss_trackers(model), terms):
        tracker.update_state(value, sample_weight=batch.static_size)
