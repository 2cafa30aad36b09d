"""Losses that only make sense over the whole batch: an overridden `compute_loss`.

Nothing is known about how such a loss splits over replicas, so it is computed once, over the
gathered outputs, and its gradients go back to the slices, which run their forward pass again to
pull them through. Exact for any loss, at the cost of one more forward pass and the gather.
"""

from __future__ import annotations

from typing import Any

from kdist import _private
from kdist.batch import SplitBatch, join
from kdist.metrics import join_masks
from kdist.plain import PlainRunner, layer_weights
from kdist.program import attach_masks

import keras
import tensorflow as tf


def gradients(
    model: keras.Model, runner: PlainRunner, batch: SplitBatch, scale: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Results per slice, as `PlainRunner.gradients` gives them, and the loss."""
    results = runner.training_results(batch)
    outputs = [r["outputs"] for r in results]
    masks = [r["masks"] for r in results]
    flat = [keras.tree.flatten(o) for o in outputs]
    added, penalties = _extra(runner, batch, results)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([flat, added, penalties])
        rebuilt = [keras.tree.pack_sequence_as(outputs[0], leaves) for leaves in flat]
        loss = _compute(model, batch, rebuilt, masks, added + penalties, training=True)
        target = loss if scale is None else loss * tf.cast(scale, loss.dtype)
    grads = tape.gradient(target, [flat, added, penalties])
    cotangents, d_added, d_penalties = grads
    results = runner.pull_back(batch, results, cotangents, d_added, d_penalties)
    return results, loss


def losses(
    model: keras.Model, runner: PlainRunner, batch: SplitBatch
) -> tuple[list[dict[str, Any]], Any]:
    """Results per slice in inference mode, and the loss."""
    results = runner.training_results(batch, training=False)
    added, penalties = _extra(runner, batch, results)
    loss = _compute(
        model,
        batch,
        [r["outputs"] for r in results],
        [r["masks"] for r in results],
        added + penalties,
        training=False,
    )
    return results, loss


def _extra(runner: PlainRunner, batch: SplitBatch, results: list) -> tuple[list, list]:
    """`add_loss` values combined over replicas, and weight penalties."""
    weights = layer_weights(batch, runner.program.add_loss_mean)
    added = []
    for values in zip(*[r["added"] for r in results]):
        added.append(tf.add_n([v * tf.cast(w, v.dtype) for v, w in zip(values, weights)]))
    return added, list(results[0]["penalties"])


def _compute(
    model: keras.Model,
    batch: SplitBatch,
    outputs: list[Any],
    masks: list[Any],
    extra: list[Any],
    training: bool,
) -> Any:
    x, y, sample_weight = batch.whole
    whole = attach_masks(join(outputs, batch.counts), join_masks(masks, batch))
    with _private.override_losses(model, extra):
        return _private.compute_loss(model, x, y, whole, sample_weight, training)
