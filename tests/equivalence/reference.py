"""One plain device that runs the same parts: the reference for models with BatchNormalization.

A BatchNormalization layer with `synchronized=False` normalises each replica's part of the batch by
that part's own statistics, so data parallelism is, on purpose, not the whole batch on one device.
It is one device that runs every part in training mode from the same moving statistics, adds up the
parts' losses by their weight in the whole batch, applies one update, and takes the mean of the
parts' moving statistics. In a pipeline a part is several micro-batches, which a device runs one
after the other: the next one finds the moving statistics as the one before left them.

The parts' predictions are joined before the loss is computed once over the whole batch. That weighs
the parts right for every reduction, mask and sample weight, without a formula of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

WEIGHTINGS = ("examples", "equal")


def part_sizes(examples: int, parts: int) -> list[int]:
    """Sizes of contiguous parts that differ by at most one, larger first; the last may be 0.

    Example:
        >>> part_sizes(13, 8)
        [2, 2, 2, 2, 2, 1, 1, 1]
    """
    size, extra = divmod(examples, parts)
    return [size + 1] * extra + [size] * (parts - extra)


def _split(data: Any, sizes: Sequence[int]) -> list[Any]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        tree.map_structure(lambda x, a=a, n=n: None if x is None else x[a : a + n], data)
        for a, n in zip(starts, sizes, strict=True)
    ]


def _join(parts: Sequence[Any]) -> Any:
    """Concatenates tensors of the same structure, and their Keras masks."""

    def join(*tensors: Any) -> Any:
        whole = tf.concat(tensors, axis=0)
        masks = [getattr(tensor, "_keras_mask", None) for tensor in tensors]
        if masks[0] is not None:
            whole._keras_mask = tf.concat(masks, axis=0)
        return whole

    return tree.map_structure(join, *parts)


def _call_losses(model: keras.Model) -> Any:
    """Sum of what `add_loss` and activity regularizers gave in the last call."""
    owners = [model, *model._flatten_layers(include_self=False)]
    losses = [loss for owner in owners for loss in owner._get_own_losses()]
    return sum(losses) if losses else None


class _PartsMixin:
    """Replaces `train_step` by the loop over parts; runs eagerly, so sizes are numbers."""

    _parts: int
    _weighting: str
    _micro_batches: int

    def _run_parts(self, xs: Sequence[Any], shares: Sequence[float]) -> tuple[list, list]:
        states = self.non_trainable_weights
        start = [tf.identity(state.value) for state in states]
        predictions, losses, ends = [], [], []
        for x, share in zip(xs, shares, strict=True):
            for state, value in zip(states, start, strict=True):
                state.assign(value)
            examples = int(tree.flatten(x)[0].shape[0])
            sizes = [size for size in part_sizes(examples, self._micro_batches) if size]
            for micro_batch, size in zip(_split(x, sizes), sizes, strict=True):
                predictions.append(self(micro_batch, training=True))
                loss = _call_losses(self)
                if loss is not None:
                    losses.append(share * size / examples * loss)
            ends.append([tf.identity(state.value) for state in states])
        for state, values in zip(states, zip(*ends, strict=True), strict=True):
            state.assign(tf.add_n(values) / tf.cast(len(values), values[0].dtype))
        return predictions, losses

    def _loss_of(self, x: Any, y: Any, y_pred: Any, weight: Any, extra: list) -> Any:
        self._losses_override = extra
        try:
            return self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True)
        finally:
            self._losses_override = []

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        examples = int(tree.flatten(x)[0].shape[0])
        sizes = [size for size in part_sizes(examples, self._parts) if size]
        if self._weighting == "examples":
            shares = [size / examples for size in sizes]
        else:
            shares = [1 / len(sizes)] * len(sizes)
        with tf.GradientTape() as tape:
            predictions, extra = self._run_parts(_split(x, sizes), shares)
            extra = extra + self._get_regularization_losses()
            y_pred = _join(predictions)
            if self._weighting == "examples":
                loss = self._loss_of(x, y, y_pred, weight, extra)
            else:
                # Wrong on purpose: it shows that the harness sees a mean of unequal parts.
                pieces = zip(_split(y, sizes), predictions, _split((weight,), sizes), strict=True)
                losses = [self._compile_loss(b, c, w) for b, c, (w,) in pieces]
                loss = tf.add_n(losses) / len(losses) + (sum(extra) if extra else 0.0)
            self._loss_tracker.update_state(loss, sample_weight=examples)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.compute_metrics(x, y, y_pred, sample_weight=weight)


def reference_parts(
    model: keras.Model, parts: int, weighting: str = "examples", micro_batches: int = 1
) -> keras.Model:
    """Makes `model.fit` train on contiguous parts of each batch, on one device.

    Compile the model with `run_eagerly=True`: sizes of parts must be known numbers.

    Args:
        model: A built model; it is changed and returned.
        parts: How many parts a batch is split into; a batch with fewer examples gives fewer.
        weighting: "examples", or "equal", which is wrong when sizes differ and exists to prove that
            the harness notices.
        micro_batches: How many micro-batches a part is split into.

    Returns:
        The same model.

    Raises:
        ValueError: For an unknown weighting or no parts.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(
            f"weighting must be one of {WEIGHTINGS}. Received: weighting={weighting!r}"
        )
    if parts < 1:
        raise ValueError(f"parts must be 1 or more. Received: parts={parts}")
    base = type(model)
    model.__class__ = type(f"Parts{base.__name__}", (_PartsMixin, base), {})
    model._parts, model._weighting, model._micro_batches = parts, weighting, micro_batches
    return model
