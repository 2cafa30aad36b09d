"""Penalties of weights, which the stage computes that has the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def penalty_function(
    variables: Sequence[keras.Variable], dtype: str, like: Callable[[Any, Any], Any]
) -> Callable[[list[Any], Any], tuple[list[Any], list[Any]]]:
    """Weight penalties of some variables, and their gradients times a scale.

    Args:
        variables: They have regularizers.
        dtype: Of the penalties.
        like: Lays a gradient out as its parameter.

    Returns:
        `function(params, scale) -> (values, gradients)`.
    """

    def function(params: list[Any], scale: Any) -> tuple[list[Any], list[Any]]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            values = [
                tf.cast(tf.reduce_sum(v.regularizer(p)), dtype) for v, p in zip(variables, params)
            ]
            target = tf.add_n(values) * tf.cast(scale, dtype)
        gradients = tape.gradient(target, params)
        return values, [
            tf.zeros_like(p) if g is None else like(g, p) for g, p in zip(gradients, params)
        ]

    return function
