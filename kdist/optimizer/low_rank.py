"""What PowerSGD keeps from step to step, on the device of every slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import compressors
from kdist.compression import PowerSGD, matrix_shape

import tensorflow as tf


class LowRankState:
    """What PowerSGD keeps of one gradient from step to step, on the device of every slice.

    Attributes:
        compressor: Rank and options.
        q: Per slice, where the next step starts, (columns, rank); with a cold start None.
        errors: Per slice, what it has not sent yet, (rows, columns); without feedback None.
        steps: Per slice, the number of steps; with a warm start None.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        compressor: PowerSGD,
        itemsize: int,
        devices: Sequence[str],
    ) -> None:
        self.name, self.shape, self.compressor = name, tuple(shape), compressor
        self.dtype = tf.float64 if itemsize == 8 else tf.float32
        self.q: list[tf.Variable] | None = None
        self.errors: list[tf.Variable] | None = None
        self.steps: list[tf.Variable] | None = None
        first = compressors.initial_q(name, shape, compressor, self.dtype)

        def each(value: Any) -> list[tf.Variable]:
            made = []
            for device in devices:
                with tf.device(device):
                    made.append(tf.Variable(value, trainable=False))
            return made

        if compressor.warm_start:
            self.q = each(first)
        else:
            self.steps = each(tf.zeros([], tf.int64))
        if compressor.error_feedback:
            self.errors = each(tf.zeros(matrix_shape(shape), self.dtype))

    @property
    def variables(self) -> list[tf.Variable]:
        """All of it."""
        return [v for family in (self.q, self.errors, self.steps) for v in family or ()]

    def start(self, s: int) -> tf.Tensor:
        """The Q of this step on slice `s`."""
        if self.q is not None:
            return tf.convert_to_tensor(self.q[s])
        assert self.steps is not None
        step = tf.convert_to_tensor(self.steps[s])
        return compressors.initial_q(self.name, self.shape, self.compressor, self.dtype, step)

    def matrix(self, gradient: Any, s: int) -> tf.Tensor:
        """A slice's gradient with what it had not sent."""
        matrix = compressors.as_matrix(gradient)
        return matrix if self.errors is None else matrix + tf.convert_to_tensor(self.errors[s])
