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
    "activation", [keras.activations.softmax, keras.activations.sigmoid, tf.nn.softmax]
)
def test_get_logits(activation: Callable) -> None:
    @tf.function
    def function(logits: Any) -> Any:
        assert keras_logits.get_logits(logits) is None
        found = keras_logits.get_logits(activation(logits))
        assert found is not None
        return found

    np.testing.assert_array_equal(function(tf.constant(FAR)), FAR)


def test_set_logits() -> None:
    """Without them the loss is that of a probability which is clipped."""

    @tf.function
    def function(logits: Any, known: bool) -> Any:
        seen = tf.identity(keras.activations.softmax(logits))
        if known:
            keras_logits.set_logits(seen, logits)
        return keras.losses.sparse_categorical_crossentropy(tf.constant([1]), seen)

    np.testing.assert_allclose(function(tf.constant(FAR), True), [120.0], rtol=1e-6)
    assert function(tf.constant(FAR), False)[0] < 20
