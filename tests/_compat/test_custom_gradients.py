"""Every internal behind `kdist._compat.custom_gradients` is there and does what is expected."""

from __future__ import annotations

from typing import Any

from kdist._compat import custom_gradients

import keras
import pytest
import tensorflow as tf


@tf.custom_gradient
def doubled(x: Any) -> Any:
    return x, lambda d: 2.0 * d


@pytest.mark.parametrize("eager", [True, False])
def test_run_by(eager: bool) -> None:
    seen = []

    def instead(run: Any, function: Any, args: Any, kwargs: Any) -> Any:
        seen.append(function.__name__)
        return run(lambda x: (x, lambda d: 3.0 * d), args, kwargs)

    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = doubled(x)
        return tape.gradient(y, x)

    def of_one() -> float:
        function = slope if eager else tf.function(slope, autograph=False)
        return float(function(tf.constant(1.0)))

    with custom_gradients.run_by(instead):
        assert of_one() == 3.0
    assert seen == ["doubled"]
    assert of_one() == 2.0


def test_is_of_library() -> None:
    assert custom_gradients.is_of_library(tf.nn.silu)
    assert custom_gradients.is_of_library(keras.activations.relu)
    assert not custom_gradients.is_of_library(test_is_of_library)
