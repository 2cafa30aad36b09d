"""How many examples rounding decides: how far counts of two correct half-precision runs may differ.

An accuracy is a step function of the logits, so no bound of the loss bounds it. But only an example
whose decision is closer than what rounding moves can fall on either side. So the reference counts
those, by the logits that its accuracy sees, and no other example may differ.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

# How far a logit may be from the true one, in eps of the largest. Plain Keras alone, on the same
# rows in batches of 8 and of 2, is 2.3 eps off.
LOGIT_EPS = 2
RUNS = 2
NAME = "undecided"


def undecided_of(accuracy: str) -> str:
    """The name in the logs that goes with an accuracy's."""
    return accuracy.removesuffix("accuracy") + NAME


def with_undecided(metrics: Any, eps: float) -> Any:
    """Adds, beside each accuracy, the share of undecided examples.

    Args:
        metrics: A list of metrics, or a dict of lists, as `compile` takes them.
        eps: Distance from 1 to the next number of the half type.
    """
    if isinstance(metrics, dict):
        return {name: with_undecided(each, eps) for name, each in metrics.items()}
    added = []
    for metric in metrics:
        if isinstance(metric, keras.metrics.SparseCategoricalAccuracy):
            added.append(_metric(_close_classes, eps))
        elif isinstance(metric, keras.metrics.BinaryAccuracy):
            added.append(_metric(_close_to_zero, eps))
    return [*metrics, *added]


def _metric(close: Any, eps: float) -> keras.metrics.Metric:
    function = functools.partial(close, eps=eps)
    return keras.metrics.MeanMetricWrapper(function, name=NAME)


def _close_classes(y_true: Any, y_pred: Any, eps: float) -> Any:
    """The first two of the classes; both move."""
    z = keras.ops.cast(y_pred, "float32")
    first, second = keras.ops.unstack(keras.ops.top_k(z, 2)[0], 2, axis=-1)
    return _as_share(first - second <= 2 * _moved(z, eps))


def _close_to_zero(y_true: Any, y_pred: Any, eps: float) -> Any:
    z = keras.ops.cast(y_pred, "float32")
    return _as_share(keras.ops.abs(z[..., 0]) <= _moved(z, eps))


def _moved(z: Any, eps: float) -> Any:
    return RUNS * LOGIT_EPS * eps * keras.ops.max(keras.ops.abs(z))


def _as_share(flags: Any) -> Any:
    return keras.ops.cast(flags, "float32")
