"""What Keras computes in another way where a graph knows how many rows a batch has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras


@contextlib.contextmanager
def unweighted_losses(model: keras.Model) -> Iterator[None]:
    """Meanwhile, each output's loss metric counts every batch once.

    So Keras does where a graph does not know how many rows a batch has: it weighs by their static
    number. `logs["loss"]` is weighted by rows in any case.
    """
    compiled = model._compile_loss
    if compiled is None:
        yield
        return

    def unweighted(metric: Any) -> Any:
        return None if metric is None else _Unweighted(metric)

    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not compiled.built:
            compiled.build(y_true, y_pred)
        trackers = compiled._metrics
        compiled._metrics = [unweighted(metric) for metric in trackers]
        try:
            return type(compiled).call(compiled, y_true, y_pred, sample_weight)
        finally:
            compiled._metrics = trackers

    object.__setattr__(compiled, "call", call)
    try:
        yield
    finally:
        object.__delattr__(compiled, "call")


class _Unweighted:
    """A metric that is updated without weights."""

    def __init__(self, metric: keras.metrics.Metric) -> None:
        self._metric = metric

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        """Updates the metric; weights have no effect."""
        self._metric.update_state(value)
