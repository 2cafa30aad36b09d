"""The TensorFlow internals behind `kdist._compat.function_graphs` are where kdist expects them."""

import gc
from collections.abc import Callable
from typing import Any

from kdist._compat import function_graphs

import keras
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.eager import context

TEXTS = tf.TensorSpec((2,), tf.string)


def test_the_graph_of_a_called_function_has_static_shapes() -> None:
    @tf.function(autograph=False)
    def double(x: tf.Tensor) -> tf.Tensor:
        return 2 * x

    graph = tf.compat.v1.wrap_function(double, [tf.TensorSpec((3, 2))]).graph
    (call,) = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    inner = function_graphs.function_graph(graph, call.get_attr("f").name)
    assert [t.shape for t in (*inner.inputs, *inner.outputs)] == [(3, 2), (3, 2)]


def test_a_function_inside_a_function_is_found_from_the_inner_graph() -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, step(y)), (0, x))[1]

    step = tf.function(tf.square, autograph=False)
    graph = tf.compat.v1.wrap_function(run, [tf.TensorSpec((3,))]).graph
    (loop,) = [op for op in graph.get_operations() if "While" in op.type]
    body = function_graphs.function_graph(graph, loop.get_attr("body").name)
    (call,) = [op for op in body.get_operations() if op.type == "PartitionedCall"]
    inner = function_graphs.function_graph(body, call.get_attr("f").name)
    assert [op.type for op in inner.get_operations()][1] == "Square"


def test_an_unknown_name_is_none() -> None:
    graph = tf.compat.v1.wrap_function(tf.square, [tf.TensorSpec((3,))]).graph
    assert function_graphs.function_graph(graph, "nothing") is None


def test_a_definition_has_a_graph_on_inputs_of_given_shapes() -> None:
    called = tf.function(lambda x, y: 2 * x + y, autograph=False)
    made = called.get_concrete_function(tf.TensorSpec((None, 3)), tf.TensorSpec(()))
    shapes = [tf.TensorShape((5, 3)), tf.TensorShape(())]
    graph = function_graphs.graph_of_definition(made.function_def, shapes)
    assert [t.shape for t in (*graph.inputs, *graph.outputs)] == [*shapes, (5, 3)]


def test_a_call_can_be_left_unoptimized() -> None:
    """And is otherwise configured as the user has it."""
    expected = config_pb2.ConfigProto.FromString(
        context.context().function_call_options.config_proto_serialized
    )
    expected.graph_options.rewrite_options.disable_meta_optimizer = True
    assert config_pb2.ConfigProto.FromString(function_graphs.unoptimized()) == expected


def test_called_as() -> None:
    """Functions that are traced and called meanwhile are prepared so, and once."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.add_n([2 * x, x, x])

    def there() -> Any:
        return config_pb2.ConfigProto.FromString(function_graphs.configured())

    before = there()
    config = function_graphs.rewritten(memory_optimization=RewriterConfig.NO_MEM_OPT)
    raw = []
    for _ in range(3):
        with function_graphs.called_as(config):
            assert there() == config_pb2.ConfigProto.FromString(config) != before
            raw.append(function_graphs.configured())
            graph = tf.compat.v1.wrap_function(lambda x: step(x), [tf.TensorSpec(())]).graph
            assert float(step(tf.constant(1.0))) == 4.0
    assert there() == before and len({*raw}) == 1
    (call,) = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    found = config_pb2.ConfigProto.FromString(call.get_attr("config_proto"))
    assert found == config_pb2.ConfigProto.FromString(config)


def test_rewritten() -> None:
    found = config_pb2.ConfigProto.FromString(
        function_graphs.rewritten(meta_optimizer_iterations=RewriterConfig.ONE)
    )
    assert found.graph_options.rewrite_options.meta_optimizer_iterations == RewriterConfig.ONE
    with pytest.raises(AttributeError):
        function_graphs.rewritten(no_such_pass=True)


def test_a_device_that_fails_says_why() -> None:
    """Without the attributes, TensorFlow nearly always reports a cancelled transfer instead."""

    def look_up(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.gather(table, ids), 0)

    called = function_graphs.one_device_function(look_up)
    devices = [one.name for one in tf.config.list_logical_devices("CPU")][:4]

    @tf.function(autograph=False)
    def step(table: tf.Tensor, ids: tf.Tensor) -> list[tf.Tensor]:
        parts = []
        for device, part in zip(devices, tf.split(ids, len(devices)), strict=True):
            with tf.device(device):
                parts.append(called(table, part))
        sums = []
        for device in devices:
            with tf.device(device):
                sums.append(tf.add_n(parts))
        return sums

    for _ in range(10):
        with pytest.raises(tf.errors.InvalidArgumentError, match="= 30 is not in"):
            step(tf.zeros((30, 8)), tf.constant([0, 1, 2, 3, 30, 5, 6, 7]))


def test_what_a_resource_is() -> None:
    variable = tf.Variable([1.0, 2.0], dtype=tf.float64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)
    seen = {}

    @tf.function(autograph=False)
    def read() -> tf.Tensor:
        value = variable.read_value() + tf.cast(table.lookup(tf.constant("a")), tf.float64)
        seen.update(
            {id(outer): inner for outer, inner in tf.compat.v1.get_default_graph().captures}
        )
        return value

    read.get_concrete_function()
    handles = variable.handle, table.resource_handle
    assert [function_graphs.is_variable(t) for t in handles] == [True, False]
    assert [function_graphs.is_variable(seen[id(t)]) for t in handles] == [True, False]
    assert function_graphs.variable_dtype(variable.handle) == tf.float64
    assert not function_graphs.is_variable(tf.constant(1.0))


@pytest.fixture
def over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in range(2)]
    both = [tf.config.LogicalDevice(name, "CPU") for name in names]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: both)


def _users() -> dict[str, Callable]:
    """Functions of texts that look them up or read a variable: outright, or in functions inside."""
    vocabulary = keras.layers.StringLookup(vocabulary=["a", "b"])
    weight = tf.Variable(tf.ones(2))
    inside = tf.function(lambda x: vocabulary(x))

    def looped(x: Any) -> Any:
        begin = (0, tf.zeros([2], tf.int64))
        return tf.while_loop(lambda i, _: i < 2, lambda i, _: (i + 1, vocabulary(x)), begin)

    def chosen(x: Any) -> Any:
        return tf.cond(x[0] == "a", lambda: vocabulary(x), lambda: tf.zeros([2], tf.int64))

    return {
        "looks up": lambda x: vocabulary(x),
        "reads": lambda x: weight + tf.strings.to_number(x),
        "branches": chosen,
        "loops": looped,
        "maps": lambda x: tf.map_fn(vocabulary, x, fn_output_signature="int64"),
        "calls": lambda x: inside(x),
    }


def test_in_control_flow() -> None:
    found: list[tuple[bool, bool]] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        here = tf.compat.v1.get_default_graph()

        def note(x: tf.Tensor) -> tf.Tensor:
            inside = tf.compat.v1.get_default_graph()
            both = function_graphs.in_control_flow(here), function_graphs.in_control_flow(inside)
            found.append(both)
            return x + 1.0

        tf.function(note, autograph=False)(x)
        tf.cond(x > 0, lambda: note(x), lambda: x)
        tf.while_loop(lambda x: x < 3.0, lambda x: (note(x),), (x,))
        return note(x)

    step(tf.constant(1.0))
    assert found == [(False, False), (True, False), (True, False), (False, False)]
    assert not function_graphs.in_control_flow()


def test_variables_apart() -> None:
    """A function that makes variables is traced twice, but for those that are made beside it."""
    traces: list[bool] = []
    kept: list[tf.Variable] = []

    def step(apart: bool) -> tf.Tensor:
        traces.append(apart)
        if len(kept) == apart:
            with function_graphs.variables_apart() if apart else tf.init_scope():
                kept.append(tf.Variable(2.0))
        return kept[apart] + 1.0

    assert [float(tf.function(step, autograph=False)(apart)) for apart in (False, True)] == [3, 3]
    assert traces == [False, False, True]


def test_what_is_read_apart_may_go() -> None:
    """A function that others call keeps what it reads, in an `init_scope` too."""
    known = [tf.Variable(2.0)]

    @tf.function
    def inner() -> tf.Tensor:
        with function_graphs.variables_apart():
            known.append(tf.Variable(known[0] + 1.0))
        return tf.identity(known[-1])

    for _ in range(2):
        assert float(tf.function(lambda: inner())()) == 3
        del known[:-1]
        gc.collect()


@pytest.mark.parametrize("way", [*_users(), ""])
def test_runs_elsewhere(way: str) -> None:
    function = _users().get(way, tf.strings.length)
    concrete = tf.function(function).get_concrete_function(TEXTS)
    assert function_graphs.runs_elsewhere(concrete.inputs) is bool(way)


@pytest.mark.parametrize("way", [*_users(), ""])
def test_takes_resources(way: str) -> None:
    function = _users().get(way, tf.strings.length)
    concrete = tf.function(function).get_concrete_function(TEXTS)
    assert function_graphs.takes_resources(concrete.function_def) is bool(way)


@pytest.mark.parametrize("way", ["loops", ""])
def test_within_one_process_all_share_the_rendezvous_of_their_caller(way: str) -> None:
    made = function_graphs.one_device_function(_users().get(way, tf.strings.length))
    definition = made.get_concrete_function(TEXTS).function_def
    assert definition.attr["shared_rendezvous"].b


@pytest.mark.usefixtures("over_processes")
@pytest.mark.parametrize("way", [*_users(), ""])
def test_over_processes_what_runs_elsewhere_does_not(way: str) -> None:
    """What is sent there has one name in all calls, which would wait for each other for ever."""
    function = _users().get(way, tf.strings.length)
    made = function_graphs.one_device_function(function).get_concrete_function(TEXTS)
    concrete = tf.function(function).get_concrete_function(TEXTS)
    for one in (made, function_graphs.of_one_device_too(concrete)):
        assert one.function_def.attr["shared_rendezvous"].b is not bool(way)


def test_in_vectorized_loop() -> None:
    found: list[bool] = []

    @tf.custom_gradient
    def noted(x: tf.Tensor) -> Any:
        found.append(function_graphs.in_vectorized_loop())
        return x, lambda d: (found.append(function_graphs.in_vectorized_loop()), d)[1]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = noted(x)
        return tape.jacobian(y, x), tf.vectorized_map(noted, x)

    step(tf.ones(3))
    assert found == [False, True, True]


def test_converted() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        if x > 0:
            x = 2 * x
        return x

    made = tf.function(function_graphs.converted(step), autograph=False)
    assert [float(made(tf.constant(x))) for x in (1.0, -1.0)] == [2.0, -1.0]
    already = tf.function(step)
    assert function_graphs.converted(already) is already


def test_traced_anew() -> None:
    traces: list[str] = []
    inner = tf.function(lambda x: (traces.append("inner"), x + 1)[1], autograph=False)

    def outer(x: tf.Tensor) -> tf.Tensor:
        return inner(x) + inner(x)

    known: dict[Any, Any] = {}
    inner(tf.constant(1))
    for _ in range(2):
        with function_graphs.traced_anew(known):
            tf.function(outer, autograph=False)(tf.constant(1))
    assert len(traces) == 2 and list(known) == [inner]
    known.clear()
    with function_graphs.traced_anew(known):
        tf.function(outer, autograph=False)(tf.constant(1))
    tf.function(outer, autograph=False)(tf.constant(1))
    assert len(traces) == 3


def test_within_xla() -> None:
    found: list[str] = []

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x: tf.Tensor) -> tf.Tensor:
        found.append(function_graphs.within_xla())
        return x + 1.0

    with function_graphs.traced_anew({}):
        tf.function(lambda x: compiled(x), autograph=False)(tf.constant(1.0))
    assert found == ["compiled"] and function_graphs.within_xla() == ""


def test_copy_handle_data() -> None:
    """Of a list of tensors, what it holds is known of the copy too."""

    def run(x: tf.Tensor) -> tf.Tensor:
        made = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[2])
        copy = tf.compat.v1.placeholder(tf.variant, ())
        function_graphs.copy_handle_data(made, copy)
        return tf.raw_ops.TensorListStack(
            input_handle=copy, element_shape=-1, element_dtype=tf.float32
        )

    graph = tf.compat.v1.wrap_function(run, [tf.TensorSpec((3, 2))]).graph
    assert graph.outputs[0].shape[1:] == (2,)


def test_share_functions() -> None:
    @tf.function(autograph=False)
    def double(x: tf.Tensor) -> tf.Tensor:
        return 2 * x

    graph = tf.compat.v1.wrap_function(double, [tf.TensorSpec((3,))]).graph
    (name,) = [
        op.get_attr("f").name for op in graph.get_operations() if op.type == "PartitionedCall"
    ]
    other = tf.Graph()
    function_graphs.share_functions(graph, other)
    assert function_graphs.function_graph(other, name).inputs


def test_made_apart() -> None:
    """A variable that a trace has made, which failed, has a value."""
    made: list[Any] = []

    def function(x: Any) -> Any:
        with function_graphs.made_apart():
            if not made:
                made.append(keras.metrics.Mean(dtype="float32"))
                raise KeyError
            made[0].update_state(x)
            return made[0].result()

    with pytest.raises(KeyError):
        tf.function(function, autograph=False)(tf.constant(3.0))
    assert float(tf.function(function, autograph=False)(tf.constant(3.0))) == 3.0


def test_shape_constant() -> None:
    """One node for all that ask, on each device, whatever the first waits for."""
    assert function_graphs.shape_constant([2, 3]) == [2, 3]
    inside = []

    @tf.function(autograph=False)
    def call(x: tf.Tensor) -> tf.Tensor:
        inside.append(function_graphs.shape_constant([3, 2]))
        return tf.reshape(x, inside[0])

    def run(x: tf.Tensor) -> Any:
        with tf.control_dependencies([tf.raw_ops.NoOp()]):
            first = function_graphs.shape_constant([3, 2])
        with tf.device("CPU:1"):
            other = function_graphs.shape_constant([3, 2])
            assert function_graphs.shape_constant((3, 2)) is other
        assert function_graphs.shape_constant((3, 2)) is first
        assert function_graphs.shape_constant([6]) is not first
        assert (first.device, other.device) == ("", "/device:CPU:1")
        assert first.op.control_inputs == []
        return call(tf.reshape(x, first))

    outputs = tf.compat.v1.wrap_function(run, [tf.TensorSpec((2, 3))]).graph.outputs
    assert outputs[0].shape == (3, 2)
    assert inside[0].graph is not outputs[0].graph


def test_forget_traces() -> None:
    one, other, traced = tf.Variable(1.0), tf.Variable(2.0), []

    class Reader(tf.Module):
        @tf.function
        def read(self) -> tf.Tensor:
            traced.append("method")
            return one + 1

    @tf.function
    def inside() -> tf.Tensor:
        return tf.identity(one)

    @tf.function
    def around() -> tf.Tensor:
        traced.append("around")
        return tf.while_loop(lambda i: i < 3.0, lambda i: (i + inside(),), (0.0,))[0]

    @tf.function
    def apart() -> tf.Tensor:
        traced.append("apart")
        return tf.identity(other)

    functions = (Reader().read, around, apart)
    for function in functions:
        function()
    del traced[:]
    function_graphs.forget_traces([one.handle])
    assert [float(function()) for function in functions] == [2, 3, 2]
    assert traced == ["method", "around"]
