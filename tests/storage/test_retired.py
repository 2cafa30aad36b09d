"""What is known to have captured a variable that moves."""

from __future__ import annotations

import gc

from kdist.storage import retired

import keras
import pytest
import tensorflow as tf


def test_what_a_trace_has_made_is_captured() -> None:
    made: list[keras.Layer] = []

    @tf.function
    def read(x: tf.Tensor) -> tf.Tensor:
        if not made:
            made.append(keras.layers.Dense(2))
        return made[0](x)

    read(tf.ones((1, 2)))
    retired.moved(made[0].kernel.value)
    assert len(retired._CAPTURED) == 1
    retired.forget_readers()


@pytest.mark.parametrize("captured", [False, True])
def test_only_captured_variables_are_looked_for(captured: bool) -> None:
    """Looking for functions takes a tenth of a second, so it is done if there is one."""
    layer = keras.layers.Dense(2)
    layer(tf.ones((1, 2)))
    with tf.GradientTape():
        layer(tf.ones((1, 2)))
    traced = tf.function(layer)
    if captured:
        traced(tf.ones((1, 2)))
    gc.collect()
    retired.moved(layer.kernel.value)
    assert len(retired._CAPTURED) == captured
    retired.forget_readers()
    assert not retired._CAPTURED
