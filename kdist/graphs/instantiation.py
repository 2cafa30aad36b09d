"""How TensorFlow prepares functions that several devices call."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kdist._compat import function_graphs
from kdist.sharding.device import Device

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
_outside: list[bytes] = []
"""How calls are configured outside of the contexts of now, outermost first."""


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
    with _rewritten(disable_meta_optimizer=True):
        yield


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
    with function_graphs.called_as(_outside[0]) if _outside else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _rewritten(**fields: Any) -> Iterator[None]:
    """Meanwhile, functions are optimized as these fields of a `RewriterConfig` say."""
    _outside.append(function_graphs.configured())
    try:
        with function_graphs.called_as(function_graphs.rewritten(**fields)):
            yield
    finally:
        _outside.pop()


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
