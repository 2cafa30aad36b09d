"""Keras's contract around the steps: what its trainer passes in, and what it expects back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kdist import _private_models, _private_optimizers

import keras
import tensorflow as tf


def is_built(model: keras.Model) -> bool:
    """Whether all variables of a model exist."""
    return model.built and all(layer.built for layer in _private_models.flat_layers(model))


def adapt_callbacks(callbacks: Any) -> None:
    """Makes callbacks that would write to TensorFlow's variables write to Keras's.

    `SwapEMAWeights` does the former on this backend, and would reach one copy of each weight.
    """
    members = getattr(callbacks, "callbacks", callbacks)
    for callback in members if isinstance(members, list | tuple) else [members]:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            _private_optimizers.swap_keras_variables(callback)


def predict_function(step: Callable, eager: bool) -> Callable:
    """Keras's predict function over a step on plain devices."""
    one = step if eager else tf.function(step, autograph=False, reduce_retracing=True)

    def predict(batches: list[Any]) -> Any:
        outputs = [one(batch) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    return predict


def as_spec(leaf: Any) -> Any:
    """A symbolic stand-in for a tensor, array or tensor spec; None for absent data."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec):
        return None
    if not hasattr(leaf, "shape"):
        leaf = tf.convert_to_tensor(leaf)
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(tuple(leaf.shape), dtype)


def peek(iterator: Any) -> tuple[Any, Any]:
    """Looks at what an iterator yields without losing it.

    Returns:
        The iterator to use from now on, and a batch or its specs.
    """
    if isinstance(iterator, tf.data.Iterator):
        return iterator, iterator.element_spec
    iterator = iter(iterator)
    first = next(iterator)
    return itertools.chain([first], iterator), first
