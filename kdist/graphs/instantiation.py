"""How TensorFlow prepares functions that several devices call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kdist.sharding.device import Device

import tensorflow as tf


@contextlib.contextmanager
def instantiated_cheaply(devices: Sequence[str]) -> Iterator[None]:
    """Leaves graph optimization of a function out where it would be repeated per replica.

    TensorFlow optimizes a function anew for each device that calls it. On CPU that is a good part
    of the first step and gains next to nothing later. On GPUs it chooses data formats, and stays.

    Args:
        devices: Those that call it, as TensorFlow names them.
    """
    if len(devices) == 1 or any(Device.parse(one).kind != "CPU" for one in devices):
        yield
        return
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        was = before.get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": was})
