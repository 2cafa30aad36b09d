"""Tensors between devices, such that what goes to another process goes there once.

In one process nothing changes: a device reads what another one made. Between processes TensorFlow
would send a tensor once for each device that reads it, over the same wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.sharding.device import Device

import tensorflow as tf


def process_of(device: str) -> Any:
    """Which process a device is of; the first one's for a device without a name."""
    return Device.parse(device).process if device else None


class Sent:
    """A tensor that devices of several processes read.

    Args:
        value: The tensor.
        source: The device that it is on.
    """

    def __init__(self, value: Any, source: str) -> None:
        self.value = value
        self._arrived = {process_of(source): value}

    def at(self, device: str) -> Any:
        """What a device reads; call it in that device's scope."""
        process = process_of(device)
        if process not in self._arrived:
            self._arrived[process] = tf.identity(self.value)
        return self._arrived[process]


def apart(tensor: Any) -> Any:
    """A tensor in memory of its own, where it is.

    A sum takes over the memory of a summand that nobody else reads. Where that is a part of a
    larger tensor, it is the memory of all of it, which stays as long as the sum does.
    """
    copy = tf.raw_ops.DeepCopy(x=tensor, name="reduced")
    if not tf.executing_eagerly():
        # TensorFlow takes it for an effect: on all devices one copy would wait for the other.
        keras_trainer.run_independently(copy.op)
    return copy


def largest(parts: Sequence[Any], name: str | None = None) -> Any:
    """The largest of some tensors, element by element; `tf.add_n` for maxima."""
    return tf.reduce_max(tf.stack(parts), axis=0, name=name)


def added(
    parts: Sequence[Any],
    devices: Sequence[str] | None,
    name: str | None = None,
    turn: int = 0,
    by: Callable[..., Any] = tf.add_n,
) -> Any:
    """The sum of tensors, on the device in scope: each process adds up its own first.

    Args:
        parts: The tensors, more than one.
        devices: Where each of them is; None: all on one.
        name: Of the operation, for graphs and profiles.
        turn: Which of a process's devices adds up: sums that differ in it spread over all.
        by: `largest` for the largest in place of the sum.
    """
    by_process: dict[Any, list[int]] = {}
    for number, device in enumerate(devices or ()):
        by_process.setdefault(process_of(device), []).append(number)
    if len(by_process) < 2:
        return by(list(parts), name=name)
    terms: list[Any] = []
    for numbers in by_process.values():
        mine = [parts[n] for n in numbers]
        if len(mine) > 1:
            assert devices is not None
            with tf.device(devices[numbers[turn % len(numbers)]]):
                mine = [by(mine, name=name)]
        terms += mine
    return by(terms, name=name)
