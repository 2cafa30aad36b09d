"""Every use of TensorFlow internals that the DTensor side needs, in one place.

TensorFlow 2.21 has no public way to do these things; `tests/dtensor/test_lowered.py` and
`tests/dtensor/test_stitching.py` fail by name when one of them moves.

- `Context.list_function_names`, `Context.get_function_def`: DTensor registers the per-device
  program that it lowered from a function under the name `_func_<number>_<number>`.
- `Context.add_function_def`, `Context.remove_function`: a function that was put together node by
  node is called by its name from then on, and forgotten when nobody can call it any more.
- `op_def_registry.get`: what kind of operation a type is.
- `error_interpolation.parse_message`: looks for names of nodes in a message, in a time that grows
  with the square of its length; DTensor's messages are whole programs, and take a minute.
- `Context.op_callbacks`, `add_op_callback`, `remove_op_callback`: what is called after every
  operation (by `tf.debugging.enable_check_numerics`, say) looks at its results, and a DTensor
  without memory behind it ends the process.
- `Operation._set_attr`: an attribute whose name begins with an underscore goes through DTensor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import error_interpolation, op_def_registry

_LOWERED = "_func_"


def context_devices() -> int | None:
    """Number of this process's CPU devices in the running context; None before it starts."""
    running = context.context()
    if not running._initialized:
        return None
    server = running._server_def or running._collective_ops_server_def
    mine = None if server is None else (server.job_name, server.task_index)
    found = [tf.DeviceSpec.from_string(one.name) for one in tf.config.list_logical_devices("CPU")]
    return sum(mine is None or (one.job, one.task) in (mine, (None, None)) for one in found)


def lowered_names() -> frozenset[str]:
    """Names of every per-device program that DTensor has lowered in this process so far."""
    names = context.context().list_function_names()
    text = (name.decode() if isinstance(name, bytes) else name for name in names)
    return frozenset(name for name in text if name.startswith(_LOWERED))


def function_def(name: str) -> Any:
    """The `FunctionDef` of a registered function."""
    return context.context().get_function_def(name)


@contextlib.contextmanager
def messages_as_they_are() -> Iterator[None]:
    """Within it, TensorFlow takes no names of nodes out of the messages of errors."""
    parse = error_interpolation.parse_message
    error_interpolation.parse_message = lambda message: (message, [], [])
    try:
        yield
    finally:
        error_interpolation.parse_message = parse


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Within it, nothing is called after an operation that TensorFlow was asked to call."""
    running = context.context()
    callbacks = [*running.op_callbacks]
    for one in callbacks:
        running.remove_op_callback(one)
    try:
        yield
    finally:
        for one in callbacks:
            running.add_op_callback(one)


def tag(tensor: Any, name: str, number: int) -> None:
    """Writes a number on the operation of a graph that makes a tensor; DTensor keeps it."""
    tensor.op._set_attr(name, attr_value_pb2.AttrValue(i=number))


def output_dtypes(node: Any) -> dict[str, list[int]]:
    """By name of each output of a `NodeDef`, the dtypes of its tensors as enumeration values."""
    found = {}
    for output in op_def_registry.get(node.op).output_arg:
        if output.type_list_attr:
            found[output.name] = list(node.attr[output.type_list_attr].list.type)
            continue
        one = node.attr[output.type_attr].type if output.type_attr else output.type
        found[output.name] = [one] * (node.attr[output.number_attr].i if output.number_attr else 1)
    return found


def has_effects(op: str) -> bool:
    """Whether operations of a type do something besides returning values: print, assert, write."""
    return bool(op_def_registry.get(op).is_stateful)


def only_result(node: Any) -> tuple[str, int]:
    """The only result of a node of a function: a reference to it, and its dtype.

    Returns:
        The dtype as an enumeration value; 0 if the node has several results, or a list.
    """
    results = op_def_registry.get(node.op).output_arg
    if len(results) != 1 or results[0].number_attr or results[0].type_list_attr:
        return "", 0
    only = results[0]
    return f"{node.name}:{only.name}:0", only.type or node.attr[only.type_attr].type


class Registered:
    """A function definition that graphs can call by its name, for as long as this object lives.

    Args:
        definition: A `FunctionDef`; its nodes name their devices, and its control outputs are what
            has to run though no result needs it, or what others wait for.
        needs: What has to live as long.
        pure: Whether nothing has to run that no result needs.
    """

    def __init__(self, definition: Any, needs: Any = None, *, pure: bool = False) -> None:
        self.needs = needs
        self.name = definition.signature.name
        self.has_effects = bool(definition.signature.control_output) and not pure
        context.context().add_function_def(definition)
        weakref.finalize(self, _forget, self.name).atexit = False

    def call(self, inputs: Sequence[Any], dtypes: Sequence[tf.DType]) -> tuple[Any, list[Any]]:
        """Calls it in the graph that is being traced.

        Args:
            inputs: Its arguments.
            dtypes: Of its results.

        Returns:
            The operation, None when executing eagerly, and the results.
        """
        graph = tf.compat.v1.get_default_graph()
        # It may be called when whoever traced it is gone.
        while graph is not None and graph.building_function:
            graph.add_to_collection("kdist_functions", self)
            graph = getattr(graph, "outer_graph", None)
        call = tf.raw_ops.PartitionedCall
        if self.has_effects:
            call = tf.raw_ops.StatefulPartitionedCall
        options = context.context().function_call_options.config_proto_serialized
        made = call(args=list(inputs), Tout=list(dtypes), f=self.name, config_proto=options)
        if tf.executing_eagerly():
            return None, list(made) if dtypes else []
        return (made[0].op, list(made)) if dtypes else (made, [])


def _forget(name: str) -> None:
    running = context.context()
    if running.has_function(name):
        running.remove_function(name)
