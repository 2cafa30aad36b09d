"""Every internal behind `kdist._compat.keras_autocast` is there and does what is expected."""

from __future__ import annotations

from kdist._compat import keras_autocast

import keras
import numpy as np
import tensorflow as tf


def test_without_autocast():
    layer, seen = keras.layers.Dense(1, dtype="mixed_bfloat16"), []
    layer.build((None, 2))

    def call(inputs):
        with keras_autocast.without_autocast():
            seen.append((layer.kernel.dtype, layer.kernel.value.dtype))
        return inputs

    layer.call = call
    layer(np.ones((1, 2), "float32"))
    assert seen == [("float32", tf.float32)]


def test_autocast_as_now():
    layer, made = keras.layers.Dense(1, dtype="mixed_bfloat16"), []
    layer.build((None, 2))

    def call(inputs):
        made.append(keras_autocast.autocast_as_now(lambda: layer.kernel.dtype))
        with keras_autocast.without_autocast():
            assert made[0]() == "bfloat16"
        return inputs

    layer.call = call
    layer(np.ones((1, 2), "float32"))
    assert made[0]() == "bfloat16" and layer.kernel.dtype == "float32"
    assert keras_autocast.autocast_as_now(lambda: layer.kernel.dtype)() == "float32"


def test_autocast_by():
    """None is no scope: one that casts to None says floatx of every variable."""
    keras.config.set_floatx("float16")
    try:
        with keras_autocast.autocast_by(None):
            assert keras.Variable(1.0, dtype="float32").dtype == "float32"
    finally:
        keras.config.set_floatx("float32")
