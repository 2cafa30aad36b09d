"""Dynamic loss scaling, as `keras.optimizers.LossScaleOptimizer` does it, over many devices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras import ops


class LossScale:
    """The state of a `LossScaleOptimizer`, moved by one decision for all devices.

    Args:
        optimizer: The `LossScaleOptimizer`.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def scale(self) -> Any:
        """What losses are multiplied by, and gradients divided by."""
        return tf.convert_to_tensor(self.optimizer.dynamic_scale.value)

    def grow(self) -> None:
        """After a step with finite gradients: doubles the scale every so many of them."""
        one = self.optimizer

        def upscale() -> None:
            one.step_counter.assign(0)
            one.dynamic_scale.assign(ops.multiply(one.dynamic_scale, 2.0))

        def increment() -> None:
            one.step_counter.assign_add(1)

        last = ops.equal(one.step_counter, one.dynamic_growth_steps - 1)
        ops.cond(last, upscale, increment)

    def skip(self) -> None:
        """After an overflow: halves the scale; nothing else changes."""
        one = self.optimizer
        one.step_counter.assign(0)
        one.dynamic_scale.assign(ops.multiply(one.dynamic_scale, 0.5))
