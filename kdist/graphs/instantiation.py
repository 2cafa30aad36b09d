"""How TensorFlow prepares functions that several devices call."""

from __future__ import annotations

import contextlib
import gc
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


@contextlib.contextmanager
def traced_without_collection() -> Iterator[None]:
    """Meanwhile, Python does not look for cycles among objects that nobody can reach.

    A graph of thousands of operations is many objects, nearly all of which stay; looking through
    them again and again is an eighth of a first step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
