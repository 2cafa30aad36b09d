"""Gradient accumulation where gradients are made: one reduction per update, not per micro-step.

Every replica keeps the sum of its own gradients, 4 bytes per fp32 parameter, and the sums are
reduced when the optimizer is due (`no_sync` of PyTorch's DDP; MindSpore's
`gradient_accumulation_shard=False`). The alternative, `True`, reduces every micro-step into shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_optimizers
from kdist.optimizer.gradients import GradientSource
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, covers, relative
from kdist.storage.parts import whole_of
from kdist.storage.variables import Stored, become_view, make_local

import keras
import tensorflow as tf


class LocalSums:
    """Sums of one optimizer's gradients, one per replica; a `GradientSource` of their total.

    Args:
        entries: `Stored` of each trainable variable.
        devices: `devices[s][k]`: TensorFlow device strings.

    Attributes:
        sums: Per variable, the local variable at each coordinate that computes.
    """

    rows: set[int] = set()
    """Rows of tables are not accumulated here; see `GradientSource`."""

    def __init__(self, entries: Sequence[Stored], devices: Sequence[Sequence[str]]) -> None:
        self.entries = list(entries)
        self.devices = devices
        self.sums: dict[int, dict[Coordinate, keras.Variable]] = {}

    def build(self, variables: Sequence[int]) -> None:
        """Makes the sums of some variables, zero."""
        for v in variables:
            placement = self.entries[v].placement
            for s in placement.slices:
                for k, device in enumerate(self.devices[s]):
                    shape = [i.stop - i.start for i in placement.inner_index(k)]
                    with tf.device(device):
                        like = self.entries[v].variable
                        zeros = tf.zeros(shape, like.dtype)
                        self.sums.setdefault(v, {})[s, k] = make_local(like, zeros)

    def add(self, source: GradientSource, variables: Sequence[int], scale: Any) -> list[Any]:
        """Adds what every coordinate computed, divided by the loss scale if there is one.

        Returns:
            What was added, by operations that those who wait for it can name.
        """
        made = []
        for v in variables:
            for (s, k), total in self.sums[v].items():
                with tf.device(self.devices[s][k]):
                    gradient = source.local(v, (s, k))
                    # Of no elements, Keras's sum of a matrix is an error.
                    if gradient is None or 0 in total.shape:
                        continue
                    if scale is not None:
                        gradient = gradient / tf.cast(scale, gradient.dtype)
                    added = total.assign_add(gradient)
                    made.append(gradient if added is None else added)
        return made

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        total = self.sums[variable].get(at)
        return None if total is None else tf.convert_to_tensor(total.value)

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        placement = self.entries[variable].placement
        if unit.shard is None:
            return whole_of(placement, lambda k: self._total(variable, k))
        index = relative(unit.index(placement), placement.inner_index(unit.owner[1]))
        return self._total(variable, unit.owner[1], index)

    def _total(self, variable: int, k: int, index: Any = None) -> Any:
        parts = []
        for s in self.entries[variable].placement.slices:
            with tf.device(self.devices[s][k]):
                part = self.local(variable, (s, k))
                parts.append(part if index is None or covers(index, part.shape) else part[index])
        return parts[0] if len(parts) == 1 else tf.add_n(parts)

    def show(self, optimizer: Any) -> None:
        """Makes the optimizer's accumulators views of the totals, which take their values over."""
        for v in self.sums:
            logical = keras_optimizers.accumulator(optimizer, self.entries[v].variable)
            assert logical is not None
            value = tf.convert_to_tensor(logical.value)
            # What was behind it is added to the totals at each update: it must not count again.
            logical.assign(tf.zeros_like(value))
            backing = Totals(self, v, optimizer.loss_scale_factor)
            backing.assign(value)
            become_view(logical, backing, None)

    def reset(self, variables: Sequence[int]) -> None:
        """Starts again from zero."""
        for v in variables:
            for (s, k), total in self.sums[v].items():
                with tf.device(self.devices[s][k]):
                    total.assign(tf.zeros_like(total.value))


class Totals:
    """Backing of a logical accumulator: the total of the replicas' sums.

    What is assigned becomes the first replica's sum.

    Args:
        sums: Of the replicas.
        variable: Which of their variables.
        scale: What the sums are multiplied by, and Keras's accumulators are not; None for 1.
    """

    def __init__(self, sums: LocalSums, variable: int, scale: float | None) -> None:
        self.sums = sums
        self.variable = variable
        self.scale = scale

    def whole(self) -> Any:
        """The total."""
        total = self.sums.unit(self.variable, UpdateUnit(self.variable, None, (0, 0)))
        return total if self.scale is None else total / tf.cast(self.scale, total.dtype)

    def assign(self, value: Any) -> None:
        """Writes the total."""
        if self.scale is not None:
            value = value * tf.cast(self.scale, value.dtype)
        placement = self.sums.entries[self.variable].placement
        for (s, k), total in self.sums.sums[self.variable].items():
            with tf.device(self.sums.devices[s][k]):
                part = value[placement.inner_index(k)]
                first = s == placement.slices[0]
                total.assign(part if first else tf.zeros_like(total.value))
