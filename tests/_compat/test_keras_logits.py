"""From what Keras's cross-entropies start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist._compat import keras_logits

import keras
import numpy as np
import pytest
import tensorflow as tf

FAR = np.array([[60.0, -60.0]], "float32")


@pytest.mark.parametrize(
    "activation",
    [keras.activations.softmax, keras.activations.sigmoid, tf.nn.softmax, tf.nn.sigmoid],
)
def test_get_logits(activation: Callable) -> None:
    @tf.function
    def function(logits: Any) -> Any:
        assert keras_logits.get_logits(logits) is None
        found = keras_logits.get_logits(activation(logits))
        assert found is not None
        operation = activation.__name__.partition("_")[0].capitalize()
        assert keras_logits.KINDS[found[0]] in ("_keras_logits", operation)
        assert bool(found[0]) == (activation in (tf.nn.softmax, tf.nn.sigmoid))
        return found[1]

    np.testing.assert_array_equal(function(tf.constant(FAR)), FAR)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "binary_crossentropy"])
@pytest.mark.parametrize(
    "activation",
    [keras.activations.softmax, keras.activations.sigmoid, tf.nn.softmax, tf.nn.sigmoid],
)
def test_with_logits(activation: Callable, loss: str) -> None:
    """Keras starts from them where it would of the tensor itself, and only there."""

    @tf.function
    def function(logits: Any, joined: bool) -> Any:
        seen = activation(logits)
        if joined:
            seen = keras_logits.with_logits(tf.identity(seen), *keras_logits.get_logits(seen))
        true = tf.constant([1] if loss.startswith("sparse") else [[0.0, 1.0]])
        return keras.losses.get(loss)(true, seen)

    kept = function(tf.constant(FAR), True)
    np.testing.assert_allclose(kept, function(tf.constant(FAR), False), rtol=1e-6)
    softmax = activation.__name__.startswith("softmax")
    if activation in (tf.nn.softmax, tf.nn.sigmoid) and softmax != loss.startswith("sparse"):
        assert np.all(kept < 20)  # what a clipped probability gives
    else:
        assert np.all(kept > 50)
