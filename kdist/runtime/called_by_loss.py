"""Layers that an overridden `compute_loss` calls: they compute for the whole batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat import keras_models

import keras


@contextlib.contextmanager
def noting_calls(layers: Sequence[keras.Layer]) -> Iterator[list[keras.Layer]]:
    """Meanwhile, gives the layers that are called and have weights, without those inside them."""
    called: list[keras.Layer] = []
    within: list[keras.Layer] = []

    def noted(layer: keras.Layer, call: Callable, *args: Any, **kwargs: Any) -> Any:
        if not within and layer.weights and layer not in called:
            called.append(layer)
        within.append(layer)
        try:
            return call(*args, **kwargs)
        finally:
            within.pop()

    with keras_models.calls_kept(layers):
        for layer in layers:
            call = keras_models.call_of(layer)
            keras_models.give_call(layer, functools.partial(noted, layer, call))
        yield called


def note(called: Sequence[keras.Layer]) -> str:
    """What is told of them."""
    return (
        "layers that compute_loss calls compute on one device, for the whole batch, on whole "
        "weights. Those that a train_step of the model's own calls run over the mesh "
        "(docs/custom_loops.md; without `pipe`). "
        f"Received: {[one.path or one.name for one in called][:3]}"
    )
