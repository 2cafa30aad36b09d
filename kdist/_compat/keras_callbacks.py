"""Attributes of Keras's own callbacks that are of the present process, and do not go on.

`tests/_compat/test_keras_callbacks.py` fails when one of them moves.
"""

from __future__ import annotations

import time
from typing import Any

import keras

OF_THE_PROCESS: dict[type, frozenset[str]] = {
    keras.callbacks.TensorBoard: frozenset(
        {
            "_batch_start_time",
            "_epoch_start_time",
            "_is_tracing",
            "_previous_epoch_iterations",
            "_profiler_started",
            "_should_trace",
            "_should_write_train_graph",
        }
    ),
}
"""By class: clocks, what is being profiled, and what has been written to the present file."""


GIVEN_BY_FIT = frozenset({"_model", "model", "params", "validation_data"})
"""Attributes that `fit` gives to every callback; those of old callbacks too."""


def of_the_process(callback: Any) -> frozenset[str]:
    """Names of a callback's attributes that say nothing once its process is gone."""
    found = [names for kind, names in OF_THE_PROCESS.items() if isinstance(callback, kind)]
    return frozenset().union(*found)


def begin_clock(callback: Any) -> None:
    """Has `TensorBoard` count the steps of this epoch, for its steps per second, from now on."""
    if isinstance(callback, keras.callbacks.TensorBoard) and callback.write_steps_per_second:
        iterations = callback.model.optimizer.iterations
        callback._previous_epoch_iterations = keras.ops.convert_to_tensor(iterations, "float32")
        callback._epoch_start_time = time.time()
