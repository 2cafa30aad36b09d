"""TensorFlow internals for functions with a gradient of their own.

`tf.custom_gradient` looks for the variables that a function reads, and asks its gradient for
theirs. What runs it, in a graph and op by op, can be replaced for a while.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat.function_graphs import function_graph, in_control_flow

import tensorflow as tf
from tensorflow.python.eager import record, tape
from tensorflow.python.ops import (
    custom_gradient,
    gradients_util,
    resource_variable_ops,
    script_ops,
)

Run = Callable[[Callable, Any, Any], Any]
"""Calls a function, with arguments and those by name, so that its gradient is its own."""

_MODES = ("_graph_mode_decorator", "_eager_mode_decorator")


@contextlib.contextmanager
def run_by(instead: Callable[[Run, Callable, Any, Any], Any]) -> Iterator[None]:
    """Meanwhile, functions with a gradient of their own are run by another function.

    Args:
        instead: Takes what ran them so far, the function, its arguments, and those by name.
    """
    before = {name: getattr(custom_gradient, name) for name in _MODES}

    def replaced(run: Run) -> Run:
        return lambda function, args, kwargs: instead(run, function, args, kwargs)

    for name, run in before.items():
        setattr(custom_gradient, name, replaced(run))
    try:
        yield
    finally:
        for name, run in before.items():
            setattr(custom_gradient, name, run)


def is_of_library(function: Callable) -> bool:
    """Whether a function is TensorFlow's or Keras's own: these take all that they read."""
    return (function.__module__ or "").partition(".")[0] in ("tensorflow", "keras")


def is_recorded(tensor: Any) -> bool:
    """Whether a tape that records in this graph could be asked for a gradient of a tensor."""
    return bool(record.should_record_backprop([tensor]))


def asked_by_graph() -> bool:
    """Whether the gradient that runs is for `tf.gradients`, or a function's, and not for a tape."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is gradients_util._GradientsHelper.__code__:
            return True
        frame = frame.f_back
    return False


def without_content(shape: Sequence[int], dtype: str) -> tf.Variable:
    """A trainable variable that has a handle, and no value."""
    return resource_variable_ops.UninitializedVariable(
        trainable=True, shape=list(shape), dtype=tf.as_dtype(dtype), name="anchor"
    )


_READ = "KdistReadOf"
"""The type under which TensorFlow finds the gradient of `read_of`."""


@tf.RegisterGradient(_READ)
def _gradient_of_read(_: Any, gradient: Any) -> tuple[Any, None]:
    return gradient, None


@functools.cache
def _passing(dtype: tf.DType) -> Any:
    """A function of a handle and a tensor that returns the tensor."""
    specs = tf.TensorSpec([], tf.resource), tf.TensorSpec(None, dtype)
    with tf.init_scope():
        return tf.function(lambda handle, tensor: tf.identity(tensor)).get_concrete_function(*specs)


def _give_shape(variable: tf.Variable) -> None:
    """Has a variable without content tell its shape, which the gradient of a loop asks it for.

    What it gets is never read, nor written: on a CPU it takes addresses, and no memory.
    """
    with tf.init_scope(), tf.device(variable.device):
        if not resource_variable_ops.var_is_initialized_op(variable.handle):
            shape = tf.constant(variable.shape.as_list(), tf.int32)
            variable.assign(tf.raw_ops.Empty(shape=shape, dtype=variable.dtype, init=False))


def read_of(variable: tf.Variable, tensor: Any) -> Any:
    """A tensor as if it had been read of a variable: its gradient is the variable's.

    `tf.custom_gradient` would hand the handle on, and TensorFlow does not differentiate a branch,
    or a loop, in which a handle is made.
    """
    if tf.executing_eagerly():
        read = tf.identity(tensor)
    else:
        if in_control_flow():
            _give_shape(variable)
        graph = tf.compat.v1.get_default_graph()
        with record.stop_recording(), graph.gradient_override_map({"PartitionedCall": _READ}):
            function = _passing(tensor.dtype)
            function.add_to_graph(graph)
            (read,) = tf.raw_ops.PartitionedCall(
                args=[variable.handle, tensor], Tout=[tensor.dtype], f=function
            )
        read.set_shape(tensor.shape)
    record.record_operation("ReadOf", [read], [variable.handle], lambda gradient: [gradient])
    return read


def standing_for(tensor: Any, make: Callable[[], Any]) -> Any:
    """What a function makes, an equal of a tensor, which takes a tape's gradient in its place."""
    with record.stop_recording():
        made = make()
    record.record_operation("StandsFor", [made], [tensor], lambda gradient: [gradient])
    return made


def watched(variable: tf.Variable, lasts: bool = False) -> None:
    """Has tapes that watch what is read watch a variable, as if it were read.

    Args:
        variable: The variable.
        lasts: Whether it lives as long as functions that are being traced. These note it, for the
            tapes of those who call them.
    """
    if lasts:
        resource_variable_ops.variable_accessed(variable)
    else:
        tape.variable_accessed(variable)


def taped_python(graph: Any) -> list[str]:
    """Names of the `tf.py_function`s of a graph that have been differentiated.

    Their gradient looks for the tape of the last call, under a name that the trace gave.

    Args:
        graph: The graph; functions that it calls are looked at too.
    """
    found: list[str] = []
    for operation in graph.get_operations():
        if operation.type == "EagerPyFunc":
            function = script_ops._py_funcs.get(operation.get_attr("token").decode())
            if getattr(function, "_support_graph_mode_gradient", False):
                found.append(operation.name)
        for attribute in operation.node_def.attr.values():
            for called in filter(
                None, (attribute.func.name, *(f.name for f in attribute.list.func))
            ):
                body = function_graph(graph, called)
                found += [] if body is None else taped_python(body)
    return found
