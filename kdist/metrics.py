"""Metrics that equal a single-device run.

The replicas' parts go through one metric state one after the other, as if one device had seen them
in order: right for sums, and for any other streaming metric. The heavy part of an update (an
argmax, a comparison with 200 thresholds) does not depend on the state, so the runtime still does
it on all devices at once; only the additions form a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import _private
from kdist.batch import SplitBatch, join
from kdist.program import attach_masks

import keras
import tensorflow as tf


def overrides(model: keras.Model, method: str) -> bool:
    """True if the user's model class defines `method` itself."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def update_metrics(
    model: keras.Model,
    batch: SplitBatch,
    outputs: Sequence[Any],
    masks: Sequence[Sequence[Any]],
    devices: Sequence[str],
) -> dict[str, Any]:
    """Updates the compiled metrics and returns the logs of the step.

    Args:
        model: The compiled model.
        batch: The batch that the replicas saw.
        outputs: Model outputs per replica.
        masks: Keras masks of the flat outputs, per replica.
        devices: The device on which each replica's outputs are.

    Returns:
        What `compute_metrics` returns on one device.
    """
    if overrides(model, "compute_metrics"):
        x, y, sample_weight = batch.whole
        whole = attach_masks(join(list(outputs), batch.counts), join_masks(masks, batch))
        return model.compute_metrics(x, y, whole, sample_weight)
    container = _private.compiled_metrics(model)
    if container is not None:
        _chain(container, batch, outputs, masks, devices)
    return model.get_metrics_result()


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
    _private.loss_tracker(model).update_state(loss, sample_weight=rows)
    for tracker, value in zip(_private.loss_trackers(model), terms):
        tracker.update_state(value, sample_weight=batch.static_size)
