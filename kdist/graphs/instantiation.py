"""How TensorFlow prepares functions that several devices call."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kdist._compat import function_graphs
from kdist.sharding.device import Device

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

_OFF = RewriterConfig.OFF
_WITHOUT_GAIN = {
    "arithmetic_optimization": _OFF,
    "constant_folding": _OFF,
    "disable_tfg_optimizer": True,
    "function_optimization": _OFF,
    "implementation_selector": _OFF,
    "layout_optimizer": _OFF,
    "loop_optimization": _OFF,
    "memory_optimization": RewriterConfig.NO_MEM_OPT,
    "meta_optimizer_iterations": RewriterConfig.ONE,
    "remapping": _OFF,
    "shape_optimization": _OFF,
}
"""Passes over graphs that are left out, and how often the others run."""
_OF_REPLICAS = ("constant_folding", "function_optimization")
"""Without these, constants and what a called function ignores are sent to other devices."""
_CHANGE_RESULTS = (
    "auto_mixed_precision",
    "auto_mixed_precision_mkl",
    "auto_mixed_precision_onednn_bfloat16",
)
"""Passes that change what is computed. Who turns one on gets it in what devices call, too."""


class _Outside(threading.local):
    """How a thread's calls are configured outside of its contexts of now, outermost first."""

    def __init__(self) -> None:
        self.stack: list[bytes] = []


_outside = _Outside()


def _results_change() -> bool:
    """Whether the user has turned on a pass that changes what is computed."""
    options = tf.config.optimizer.get_experimental_options()
    return any(options.get(name) for name in _CHANGE_RESULTS)


@contextlib.contextmanager
def instantiated_cheaply(devices: Sequence[str]) -> Iterator[None]:
    """Leaves graph optimization of a function out where it would be repeated per replica.

    TensorFlow optimizes a function anew for each device that calls it. On CPU that is a good part
    of the first step and gains next to nothing later. On GPUs it chooses data formats, and stays.

    Args:
        devices: Those that call it, as TensorFlow names them.
    """
    elsewhere = len(devices) == 1 or any(Device.parse(one).kind != "CPU" for one in devices)
    if elsewhere or _results_change():
        yield
        return
    with _rewritten(disable_meta_optimizer=True):
        yield


def of_segments() -> bytes:
    """How calls of parts of a program are configured, which as little is gained from optimizing."""
    made = function_graphs.configured if _results_change() else function_graphs.unoptimized
    return made()


@contextlib.contextmanager
def prepared_cheaply(devices: Sequence[str], *, calls: bool = False) -> Iterator[None]:
    """Meanwhile, functions that are called for the first time are optimized by one pass alone.

    The graph of a step has sums and updates for each replica, over inner axes a copy of the model
    for each device, and in a pipeline for each micro-batch; each pass over it takes as long. On CPU
    that which drops needless edges and nodes (`dependency_optimization`) makes a step over inner
    axes a seventh faster; the others, a seventh to a third of the first step, make no difference.
    On GPUs they choose data formats, and stay.

    Args:
        devices: Those that compute, as TensorFlow names them.
        calls: Each device calls functions, which get and return no more than somebody needs.
    """
    if any(Device.parse(one).kind != "CPU" for one in devices):
        yield
        return
    left_out = {k: v for k, v in _WITHOUT_GAIN.items() if not (calls and k in _OF_REPLICAS)}
    with _rewritten(**left_out):
        yield


@contextlib.contextmanager
def optimized_as_ever() -> Iterator[None]:
    """Meanwhile, functions are optimized as they would be without kdist."""
    stack = _outside.stack
    with function_graphs.called_as(stack[0]) if stack else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _rewritten(**fields: Any) -> Iterator[None]:
    """Meanwhile, functions are optimized as these fields of a `RewriterConfig` say."""
    _outside.stack.append(function_graphs.configured())
    try:
        with function_graphs.called_as(function_graphs.rewritten(**fields)):
            yield
    finally:
        _outside.stack.pop()


def within(context: Callable[[], AbstractContextManager], function: Callable) -> Callable:
    """The function, called within a new such context each time."""

    def call(*arguments: Any) -> Any:
        with context():
            return function(*arguments)

    return call


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
