"""What PowerSGD keeps from step to step, on the device of every slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.config.compression import PowerSGD, matrix_shape
from kdist.optimizer import compressors
from kdist.storage.variables import same_device

import tensorflow as tf


class LowRankState:
    """What PowerSGD keeps of one gradient from step to step, on the device of every slice.

    Args:
        name: Of the matrix, to draw by.
        shape: Of the gradient.
        compressor: Rank and options.
        itemsize: Bytes of an element of the gradient.
        devices: By slice that computes the gradient, its device.

    Attributes:
        q: By slice, where the next step starts, (columns, rank); with a cold start empty.
        errors: By slice, what it has not sent yet, (rows, columns); without feedback empty.
        steps: By slice, the number of steps; with a warm start empty.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        compressor: PowerSGD,
        itemsize: int,
        devices: Mapping[int, str],
    ) -> None:
        self.name, self.shape, self.compressor = name, tuple(shape), compressor
        self.dtype = tf.float64 if itemsize == 8 else tf.float32
        self.q: dict[int, tf.Variable] = {}
        self.errors: dict[int, tf.Variable] = {}
        self.steps: dict[int, tf.Variable] = {}
        first = compressors.initial_q(name, shape, compressor, self.dtype)
        if compressor.warm_start:
            self.q = _on(devices, dict.fromkeys(devices, first))
        else:
            self.steps = _on(devices, dict.fromkeys(devices, tf.zeros([], tf.int64)))
        if compressor.error_feedback:
            zeros = tf.zeros(matrix_shape(shape), self.dtype)
            self.errors = _on(devices, dict.fromkeys(devices, zeros))

    @property
    def variables(self) -> list[tf.Variable]:
        """All of it."""
        return [v for family in (self.q, self.errors, self.steps) for v in family.values()]

    def move(self, devices: Mapping[int, str]) -> None:
        """Goes on with other slices, in their order, or on other devices.

        The sum of the errors, and so what training has not seen yet, stays.
        """
        for name in ("q", "errors", "steps"):
            family = getattr(self, name)
            if not family or all(_is_on(family.get(s), d) for s, d in devices.items()):
                continue
            values = [tf.convert_to_tensor(v) for v in family.values()]
            given = dict(zip(devices, values))
            if name == "errors":
                first = next(iter(given))
                given[first] = tf.add_n([given[first], *values[len(devices) :]])
            blank = tf.zeros_like(values[0]) if name == "errors" else values[0]
            setattr(self, name, _on(devices, {s: given.get(s, blank) for s in devices}))

    def start(self, s: int) -> tf.Tensor:
        """The Q of this step on slice `s`."""
        if self.q:
            return tf.convert_to_tensor(self.q[s])
        step = tf.convert_to_tensor(self.steps[s])
        return compressors.initial_q(self.name, self.shape, self.compressor, self.dtype, step)

    def matrix(self, gradient: Any, s: int) -> tf.Tensor:
        """A slice's gradient with what it had not sent."""
        matrix = compressors.as_matrix(gradient)
        return matrix + tf.convert_to_tensor(self.errors[s]) if self.errors else matrix


def _on(devices: Mapping[int, str], values: Mapping[int, Any]) -> dict[int, tf.Variable]:
    """A variable per slice, on its device."""
    made = {}
    for s, device in devices.items():
        with tf.device(device):
            made[s] = tf.Variable(tf.identity(values[s]), trainable=False)
    return made


def _is_on(variable: tf.Variable | None, device: str) -> bool:
    return variable is not None and same_device(variable.device, device)
