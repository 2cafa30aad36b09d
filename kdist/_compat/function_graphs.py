"""Every use of TensorFlow internals for the functions that a traced graph calls."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import control_flow_v2_func_graphs, handle_data_util
from tensorflow.python.ops.parallel_for import control_flow_ops


def of_one_device(*, elsewhere: bool = False) -> dict[str, bool]:
    """Attributes of a function that each of several devices calls as one node of its graph.

    It shares the caller's rendezvous. Otherwise, when an operation in it fails, TensorFlow cancels
    what other devices wait for before the caller hears of the failure, and what the user gets is
    "RecvAsync is cancelled" in place of the reason. Where such a function sends to another process,
    two calls of it would send under one name, and wait for ever: there it does not share. Nor with
    GPUs, where it may send to its own CPU.

    Args:
        elsewhere: Operations of it run on other devices: see `runs_elsewhere`.
    """
    devices = tf.config.list_logical_devices()
    processes = {device.name.partition("/device:")[0] for device in devices}
    sends = any(device.device_type == "GPU" for device in devices)
    sends |= elsewhere and len(processes) > 1
    return {"_noinline": True, "shared_rendezvous": not sends}


def runs_elsewhere(tensors: Sequence[Any]) -> bool:
    """Whether a function that takes or captures these may have operations that run elsewhere.

    A look-up in a table of texts runs where the table is, and a variable is read where it lies.
    What branches, bodies of loops and other functions inside use, the function takes for them.
    """
    return any(one.dtype == tf.resource for one in tensors)


def takes_resources(definition: Any) -> bool:
    """The same of a function's definition: see `runs_elsewhere`."""
    return any(one.type == types_pb2.DT_RESOURCE for one in definition.signature.input_arg)


def unoptimized() -> bytes:
    """How a call of a function is configured that is not optimized for each device anew."""
    return rewritten(disable_meta_optimizer=True)


def rewritten(**fields: Any) -> bytes:
    """How calls of functions are configured now, but for these fields of their `RewriterConfig`.

    `tf.config.optimizer.set_experimental_options` sets some of them, for the whole process; neither
    `memory_optimization` nor `meta_optimizer_iterations` is among them.
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(configured())
    for name, value in fields.items():
        setattr(config.graph_options.rewrite_options, name, value)
    return bytes(config.SerializeToString(deterministic=True))


def configured() -> bytes:
    """How calls of functions are configured now: a serialized `ConfigProto`."""
    return bytes(context.context().function_call_options.config_proto_serialized)


@contextlib.contextmanager
def called_as(config: bytes) -> Iterator[None]:
    """Meanwhile, this thread's calls of functions are configured so.

    What `tf.config` is told within the block, in a step that is traced, stays.
    """
    running = context.context()
    before = running.function_call_options
    running.function_call_options = meanwhile = _call_options(config, before.executor_type)
    try:
        yield
    finally:
        if running.function_call_options is meanwhile:
            running.function_call_options = before


@functools.lru_cache(maxsize=64)
def _call_options(config: bytes, executor_type: str | None) -> Any:
    """The same object for the same: its bytes are part of a prepared function's key.

    Serialized again, entries of a map may come in another order.
    """
    parsed = config_pb2.ConfigProto.FromString(config)
    return context.FunctionCallOptions(executor_type=executor_type, config_proto=parsed)


def one_device_function(call: Callable, **options: Any) -> Any:
    """A `tf.function` with these attributes, of which TensorFlow takes one by no other way.

    What it captures is known at the end of its trace, after which TensorFlow reads the attributes.
    """
    given = of_one_device()
    shares = attr_value_pb2.AttrValue(b=given.pop("shared_rendezvous"))

    @functools.wraps(call)
    def traced(*arguments: Any) -> Any:
        found = call(*arguments)
        # With `tf.config.run_functions_eagerly(True)` there is no trace.
        captured = getattr(tf.compat.v1.get_default_graph(), "external_captures", ())
        if runs_elsewhere(captured):
            shares.b = of_one_device(elsewhere=True)["shared_rendezvous"]
        return found

    function = tf.function(traced, autograph=False, experimental_attributes=given, **options)
    function._shared_rendezvous = shares
    return function


def of_one_device_too(concrete: Any) -> Any:
    """A concrete function with these attributes: the same graph, under another name."""
    attributes = of_one_device(elsewhere=runs_elsewhere(concrete.inputs))
    return concrete_function.ConcreteFunction.from_func_graph(
        concrete.graph, concrete.function_type, attributes
    )


def function_graph(graph: Any, name: str) -> Any:
    """The traced graph of a function that operations of a graph call, with its static shapes.

    Args:
        graph: The graph that the calling operation is in.
        name: The function's name, as in the operation's attribute.

    Returns:
        A `FuncGraph` with `inputs` and `outputs`, or None if the function was not traced in this
        process (it comes from a file, for example).
    """
    while graph is not None:
        found = graph._functions.get(name)
        if found is not None:
            return getattr(found, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


@contextlib.contextmanager
def variables_apart() -> Iterator[None]:
    """Meanwhile, variables are made beside whatever is being traced, and kept by who makes them.

    A `tf.function` in whose trace variables are made is traced once more, wherever these are. And a
    function that is called by others has to keep what it reads, even in an `init_scope`; what is
    read here, such as state that moves, may go.
    """
    graph = tf.compat.v1.get_default_graph()
    creators, graph._variable_creator_stack = graph._variable_creator_stack, []
    try:
        with _unwatched(graph), tf.init_scope():
            yield
    finally:
        graph._variable_creator_stack = creators


@contextlib.contextmanager
def _unwatched(graph: Any) -> Iterator[None]:
    """Meanwhile, a function's graph notes no variable that is read."""
    if not hasattr(getattr(graph, "watch_variable", None), "__self__"):  # no function's, or within
        yield
        return
    graph.watch_variable = lambda variable: None
    try:
        yield
    finally:
        del graph.watch_variable


_OF_VARIABLES = (
    *("initial_value", "trainable", "validate_shape", "name", "dtype", "constraint"),
    *("synchronization", "aggregation", "shape"),
)
"""What `tf.Variable` takes of what a creator of variables is given."""


@contextlib.contextmanager
def made_apart() -> Iterator[None]:
    """Meanwhile, variables that a trace makes have their values, whether or not it comes to an end.

    Those of a `tf.function` get them once it is traced: what a trace that failed has made (a
    metric, by its first update) had none. A value that follows from the trace's tensors is left.
    """

    def make(next_creator: Callable, **kwargs: Any) -> Any:
        if tf.is_symbolic_tensor(kwargs.get("initial_value")):
            return next_creator(**kwargs)
        with variables_apart():
            return tf.Variable(**{name: kwargs[name] for name in _OF_VARIABLES if name in kwargs})

    with tf.variable_creator_scope(make):
        yield


def in_control_flow(within: Any = None) -> bool:
    """Whether what is traced is the body of a `tf.while_loop`, or a branch of a `tf.cond`.

    Args:
        within: The graph in which that would have to begin; any by default.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    kinds = (
        control_flow_v2_func_graphs.CondBranchFuncGraph,
        control_flow_v2_func_graphs.WhileBodyFuncGraph,
        control_flow_v2_func_graphs.WhileCondFuncGraph,
    )
    while graph is not None and graph is not within:
        if isinstance(graph, kinds):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def converted(function: Callable) -> Callable:
    """A function as `tf.function` traces it: what it does by the values of tensors is in a graph.

    A `tf.function` does so by itself.
    """
    if isinstance(function, polymorphic_function.Function):
        return function
    options = converter.ConversionOptions(recursive=True, user_requested=True)
    enabled = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options)
    made: Callable = api.tf_convert(function, enabled)
    return made


_COMPILED: list[str] = []
"""Names of the functions with `jit_compile=True` that are called now; see `traced_anew`."""


def within_xla() -> str:
    """The function for XLA that is traced now, of those seen by `traced_anew`; "" if none is."""
    return _COMPILED[-1] if _COMPILED else ""


@contextlib.contextmanager
def traced_anew(known: MutableMapping[Any, Any]) -> Iterator[None]:
    """Meanwhile, a user's `tf.function` that is called in a graph has traces of its own for it.

    TensorFlow would take one from before, whatever `call` of a layer did by then.

    Args:
        known: What stands for each `tf.function`, so that it is traced once; filled here.
    """
    kind = polymorphic_function.Function
    before = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        home = (getattr(self.python_function, "__module__", None) or "").partition(".")[0]
        if home in ("kdist", "keras", "tensorflow") or tf.executing_eagerly():
            return before(self, *args, **kwargs)
        if self not in known:
            known[self] = self._clone(None)
        if not self._jit_compile:
            return before(known[self], *args, **kwargs)
        _COMPILED.append(self.python_function.__name__)
        try:
            return before(known[self], *args, **kwargs)
        finally:
            _COMPILED.pop()

    kind.__call__ = called
    try:
        yield
    finally:
        kind.__call__ = before


def in_vectorized_loop() -> bool:
    """Whether what is traced is done for many at once: `tf.vectorized_map`, `tape.jacobian`.

    TensorFlow then writes each operation again, for all; the body is in the graph around it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is control_flow_ops._pfor_impl.__code__:
            return True
        frame = frame.f_back
    return False


def variable_dtype(handle: Any) -> tf.DType | None:
    """Of the variable that a resource is; None of another resource, such as a table of texts."""
    data = handle_data_util.get_handle_data(handle)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def is_variable(tensor: Any) -> bool:
    """Whether a tensor is the handle of a variable."""
    return tensor.dtype == tf.resource and variable_dtype(tensor) is not None


def graph_of_definition(definition: Any, shapes: Sequence[tf.TensorShape]) -> Any:
    """The graph of a function's definition, on inputs of some shapes.

    Args:
        definition: A `FunctionDef`; what it calls is known to TensorFlow's runtime.
        shapes: Of its inputs.
    """
    given = type(definition)()
    given.CopyFrom(definition)
    for argument in given.arg_attr.values():
        argument.attr.pop("_output_shapes", None)  # which would count, and not those that are given
    return function_def_to_graph.function_def_to_graph(given, input_shapes=list(shapes))


def copy_handle_data(tensor: Any, copy: Any) -> None:
    """Tells a copy of a list of tensors, or of a resource, what is inside."""
    handle_data_util.copy_handle_data(tensor, copy)


def share_functions(graph: Any, other: Any) -> None:
    """Has a graph know the functions that operations of another one call."""
    for function in graph._functions.values():
        other._add_function(function)


def shape_constant(dims: Sequence[int]) -> Any:
    """A shape to reshape to, which all that ask for it in a graph share, device by device.

    A tenth of the nodes of a first step were such shapes. Where nothing is traced, the numbers.
    """
    if tf.executing_eagerly():
        return list(dims)
    graph = tf.compat.v1.get_default_graph()
    devices = tuple(one.display_name for one in graph._device_function_stack.peek_objs())
    if not hasattr(graph, "_kdist_shapes"):
        graph._kdist_shapes = {}
    known = graph._kdist_shapes
    key = (devices, *dims)
    if key not in known:
        with tf.control_dependencies(None):  # others ask that wait for nothing
            known[key] = tf.constant(list(dims), tf.int32)
    return known[key]


def forget_traces(captured: Sequence[Any]) -> None:
    """Has every `tf.function` whose trace captured one of some tensors be traced anew when called.

    TensorFlow keeps no list of functions; all objects are looked through.

    Args:
        captured: Such as handles of variables. What is not there any more is not looked for.
    """
    known = {id(one) for one in captured}
    for one in gc.get_objects():
        if type(one) is not polymorphic_function.Function:
            continue
        traces = one._function_cache.values()
        if any(id(tensor) in known for trace in traces for tensor in trace.captured_inputs):
            one._function_cache.clear()
