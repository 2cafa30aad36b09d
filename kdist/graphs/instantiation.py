"""How TensorFlow prepares functions that several devices call."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.sharding.device import Device

import tensorflow as tf

_WITHOUT_GAIN = (
    "arithmetic_optimization",
    "constant_folding",
    "function_optimization",
    "implementation_selector",
    "layout_optimizer",
    "loop_optimization",
    "remapping",
    "shape_optimization",
)
"""Passes over graphs, as `tf.config.optimizer.set_experimental_options` names them."""
_OFF = {"disable_meta_optimizer": False}
_before: list[dict[str, Any]] = []
"""What was set around the contexts of now, outermost first."""


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
    with _options({"disable_meta_optimizer": True}):
        yield


@contextlib.contextmanager
def prepared_cheaply(devices: Sequence[str]) -> Iterator[None]:
    """Meanwhile, functions that are called for the first time are optimized by one pass alone.

    The graph of a step over inner axes has a copy of the model for each device, and in a pipeline
    for each micro-batch, and each pass over it takes as long. On CPU that which drops needless
    edges and nodes (`dependency_optimization`) makes a step a seventh faster, the others, together
    a third of the first step, make no difference. On GPUs they choose data formats, and stay.

    Args:
        devices: Those that compute, as TensorFlow names them.
    """
    if any(Device.parse(one).kind != "CPU" for one in devices):
        yield
        return
    with _options(dict.fromkeys(_WITHOUT_GAIN, False)):
        yield


@contextlib.contextmanager
def optimized_as_ever() -> Iterator[None]:
    """Meanwhile, functions are optimized as they would be without kdist."""
    if not _before:
        yield
        return
    with _options({**dict.fromkeys(_WITHOUT_GAIN, True), **_OFF, **_before[0]}):
        yield


@contextlib.contextmanager
def _options(options: Mapping[str, bool]) -> Iterator[None]:
    """Meanwhile, TensorFlow's optimizer has some options."""
    before = tf.config.optimizer.get_experimental_options()
    _before.append(before)
    tf.config.optimizer.set_experimental_options(dict(options))
    try:
        yield
    finally:
        _before.pop()
        # What was not set is on, but for what turns all off.
        was = {name: before.get(name, name not in _OFF) for name in options}
        tf.config.optimizer.set_experimental_options(was)


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
