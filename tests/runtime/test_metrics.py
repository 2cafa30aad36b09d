"""Which metrics are known to add up over rows, so that they stay on the replicas' devices."""

from __future__ import annotations

from kdist.runtime.metrics import adds_up

import keras
import pytest
import tensorflow as tf
from keras import ops

LABELS = tf.TensorSpec((None, 1), tf.int32)
VALUES = tf.TensorSpec((None, 4), tf.float32)
LINE = tf.TensorSpec((None,), tf.float32)
metrics = keras.metrics

KERAS = {
    "accuracy": (metrics.SparseCategoricalAccuracy(), LABELS),
    "categorical_accuracy": (metrics.CategoricalAccuracy(), VALUES),
    "binary_accuracy": (metrics.BinaryAccuracy(), VALUES),
    "exact": (metrics.Accuracy(), VALUES),
    "top_k": (metrics.SparseTopKCategoricalAccuracy(k=2), LABELS),
    "entropy": (metrics.SparseCategoricalCrossentropy(from_logits=True), LABELS),
    "categorical": (metrics.CategoricalCrossentropy(label_smoothing=0.1), VALUES),
    "binary": (metrics.BinaryCrossentropy(from_logits=True), VALUES),
    "mse": (metrics.MeanSquaredError(), VALUES),
    "mae": (metrics.MeanAbsoluteError(), VALUES),
    "rmse": (metrics.RootMeanSquaredError(), VALUES),
    "cosine": (metrics.CosineSimilarity(), VALUES),
    "kl": (metrics.KLDivergence(), VALUES),
    "correlation": (metrics.PearsonCorrelation(), VALUES),
    "auc": (metrics.AUC(), VALUES),
    "f1": (metrics.F1Score(), VALUES),
    "r2": (metrics.R2Score(), VALUES),
}


@pytest.mark.parametrize("name", KERAS)
def test_keras_metrics_add_up(name):
    metric, targets = KERAS[name]
    assert adds_up(metric, targets, VALUES)


def wrapped(function):
    return metrics.MeanMetricWrapper(function)


def error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


class Mine(metrics.MeanSquaredError):
    """What a subclass does in `update_state` is not known."""


def test_functions_of_single_rows_add_up():
    assert adds_up(wrapped(error), VALUES, VALUES)
    assert adds_up(wrapped(lambda y_true, y_pred: ops.square(y_true - y_pred)), VALUES, VALUES)


@pytest.mark.parametrize(
    ("metric", "targets", "predictions"),
    [
        (wrapped(lambda y_true, y_pred: ops.mean(y_pred)), VALUES, VALUES),
        (wrapped(lambda y_true, y_pred: ops.max(y_pred)), VALUES, VALUES),
        (wrapped(lambda y_true, y_pred: y_pred - ops.mean(y_pred, axis=0)), VALUES, VALUES),
        (wrapped(keras.losses.MeanSquaredError()), VALUES, VALUES),
        (wrapped(lambda y_true, y_pred: 1 / 0), VALUES, VALUES),
        (metrics.CosineSimilarity(axis=0), VALUES, VALUES),
        # It asks whether all labels are zeros and ones.
        (metrics.Hinge(), VALUES, VALUES),
        (metrics.MeanSquaredError(), LINE, LINE),
        (metrics.AUC(), LINE, LINE),
        (Mine(), VALUES, VALUES),
    ],
)
def test_what_is_not_known_to_add_up(metric, targets, predictions):
    assert not adds_up(metric, targets, predictions)
