"""What makes the distributed loss the single-device loss: how much each replica's mean counts.

Keras averages each compiled loss over the values it has: over a replica's values, in a replica.
The whole batch's loss is their weighted mean, L = sum_r (c_r / sum_q c_q) * L_r, where c counts
what Keras divides by: rows; with a mask, valid positions; with "mean_with_sample_weight", the
weights. Loss terms with reduction "sum" add up. So every replica runs Keras's own loss code, and
only one number per term and replica, the *share* c_r / sum c, has to be agreed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.program.loss_parts import added_name

import keras
import tensorflow as tf
from keras import ops


@dataclasses.dataclass(frozen=True)
class TermKind:
    """How one compiled loss combines over replicas.

    Attributes:
        name: Name of the loss.
        summed: True if replicas' values add up (reduction "sum").
        weight_mean: True for reduction "mean_with_sample_weight".
    """

    name: str
    summed: bool
    weight_mean: bool


def term_kinds(model: keras.Model) -> list[TermKind]:
    """One `TermKind` per compiled loss; without a reduction, see `kdist.runtime.whole_loss`."""
    return [
        TermKind(name, loss.reduction == "sum", loss.reduction == "mean_with_sample_weight")
        for _, loss, _, name in keras_trainer.compiled_losses(model)
    ]


def has_rows(rows_share: Any) -> Any:
    """1 for a replica with rows, 0 for one that computes on a stand-in; in the share's dtype."""
    return ops.cast(rows_share > 0, rows_share.dtype)


def added_parts(
    scope: keras.StatelessScope,
    layers: Sequence[keras.Layer],
    rows_share: Any,
    gives_means: Callable[[keras.Layer | None], bool],
) -> list[tuple[str, Any]]:
    """What layers gave to `add_loss` in a scope, with names, as it counts on a replica.

    Args:
        scope: The scope of the forward pass.
        layers: The layers that may have added something.
        rows_share: The replica's share of the rows.
        gives_means: Whether the values of a layer are means over rows; otherwise they count fully
            where there are rows.
    """
    found = []
    for value in keras_trainer.add_loss_values(scope):
        layer = keras_trainer.adder_of(layers, value)
        weight = rows_share if gives_means(layer) else has_rows(rows_share)
        value = ops.sum(ops.cast(value, keras.config.floatx()))  # as Keras does
        found.append((added_name(layer), value * ops.cast(weight, value.dtype)))
    return found


class SharedLoss:
    """Stands for one compiled loss during a trace: Keras's value times the replica's share.

    A sum counts fully, but on a replica without rows not at all. Records
    whether the term's count depends on the data (a mask, or weights), in which case the shares are
    found by a `CountedLoss` pass first.
    """

    def __init__(self, loss: keras.Loss, kind: TermKind, share: Any, rows_share: Any) -> None:
        self.loss, self.kind = loss, kind
        self.weight = has_rows(rows_share) if kind.summed else share
        self.value: Any = None
        self.counts_by_data = False

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Keras's value on this replica, times the replica's share."""
        masks: list[Any] = []
        with _recording_call(self.loss, masks):
            value = self.loss(y_true, y_pred, sample_weight)
        masked = keras_trainer.get_mask(y_pred) is not None or any(m is not None for m in masks)
        self.counts_by_data = _by_data(self.kind, masked, sample_weight)
        self.value = value * ops.cast(self.weight, value.dtype)
        return self.value


class CountedLoss:
    """Stands for one compiled loss during the counting pass: records what Keras divides by.

    `counts_by_data` as in `SharedLoss`.
    """

    def __init__(self, loss: keras.Loss, kind: TermKind, rows: Any) -> None:
        self.loss, self.kind, self.rows = loss, kind, rows
        self.count: Any = None
        self.counts_by_data = False

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Keras's value; the count is kept in `count`."""
        dtype = self.loss.dtype
        masks: list[Any] = []
        with _recording_call(self.loss, masks):
            value = self.loss(y_true, y_pred, sample_weight)
        found = [m for m in (keras_trainer.get_mask(y_pred), *masks) if m is not None]
        mask = None
        for m in found:
            mask = m if mask is None else ops.logical_and(mask, m)
        rows = ops.cast(self.rows, "float64")
        self.counts_by_data = _by_data(self.kind, mask is not None, sample_weight)
        if self.kind.weight_mean and (mask is not None or sample_weight is not None):
            if sample_weight is not None:
                sample_weight = ops.convert_to_tensor(sample_weight, dtype=dtype)
            merged = keras_trainer.apply_mask(
                sample_weight, mask, dtype=dtype, reduction=self.loss.reduction
            )
            count = ops.sum(merged)
        elif mask is not None:
            count = ops.sum(ops.cast(mask, dtype))
        else:
            count = rows
        count = ops.cast(count, "float64")
        self.count = ops.where(rows > 0, count, ops.zeros_like(count))
        return value


def _by_data(kind: TermKind, masked: bool, sample_weight: Any) -> bool:
    """Whether what a loss counts depends on the data: on a mask, or on weights."""
    weighted = kind.weight_mean and sample_weight is not None
    return not kind.summed and (masked or weighted)


class _recording_call:
    """While active, records the Keras masks that a loss object's `call` puts on its values."""

    def __init__(self, loss: keras.Loss, masks: list[Any]) -> None:
        self.loss, self.masks = loss, masks

    def __enter__(self) -> None:
        inner = self.loss.call
        self._assigned = vars(self.loss).get("call")  # to the object, by the user

        def call(*args: Any, **kwargs: Any) -> Any:
            values = inner(*args, **kwargs)
            self.masks.append(keras_trainer.get_mask(values))
            return values

        self.loss.call = call

    def __exit__(self, *exc: Any) -> None:
        del self.loss.__dict__["call"]
        if self._assigned is not None:
            self.loss.call = self._assigned


def shares_from_counts(counts: Sequence[Any]) -> list[Any]:
    """Each replica's share of every term: count over the sum of counts, 0 where that is 0.

    Args:
        counts: Per replica, a float64 tensor of shape (terms,).

    Returns:
        Per replica, a float64 tensor of shape (terms,).
    """
    total = tf.add_n([tf.identity(c) for c in counts])
    return [tf.math.divide_no_nan(c, total) for c in counts]
