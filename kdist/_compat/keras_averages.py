"""Keras internals of the averages of weights that an optimizer keeps with `use_ema`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def average_weights(optimizer: Any) -> None:
    """What `apply` does last if `use_ema` is set: averages, and every few steps weights of them."""
    if not optimizer.use_ema:
        return
    variables = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(variables)
    if every := optimizer.ema_overwrite_frequency:
        keras.ops.cond(
            (optimizer.iterations + 1) % every == 0,
            lambda: optimizer._overwrite_model_variables_with_average_value(variables),
            lambda: None,
        )


def overwrite_by_assign(optimizer: Any) -> None:
    """Has an optimizer write averages to Keras variables, where Keras takes the `tf.Variable`.

    So that they reach every copy of a variable that is a view.
    """

    def write(variables: Sequence[keras.Variable]) -> None:
        averages = optimizer._model_variables_moving_average
        for variable, average in zip(variables, averages):
            if average is not None:
                variable.assign(average)

    object.__setattr__(optimizer, "_overwrite_model_variables_with_average_value", write)
