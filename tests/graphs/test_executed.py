import re

from kdist.graphs import executed
from kdist.graphs.executed import (
    ASSIGNMENTS,
    PRODUCTS,
    ExecutedFunction,
    ExecutedNode,
    ExecutedTransfer,
)

import pytest
import tensorflow as tf

import compute_devices

ONE, TWO, THREE = "/device:CPU:1", "/device:CPU:2", "/device:CPU:3"
X = tf.ones((4, 4))


def kept_as_one_node(function):
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def watched(function, *inputs):
    """Runs a new function and returns what it executed."""
    program = tf.function(function, autograph=False)
    return executed.largest(executed.watch(lambda: program(*inputs)))


def test_nodes_have_the_device_on_which_they_ran():
    def program(x):
        with tf.device(ONE):
            y = tf.matmul(x, x)
        with tf.device(THREE):
            return tf.matmul(y, tf.exp(y))

    found = watched(program, X)
    assert found.count(PRODUCTS) == {ONE: 1, THREE: 1}
    assert found.count("Exp") == {THREE: 1}
    assert {ONE, THREE} <= set(found.devices)


def test_transfers_name_the_tensor_its_devices_and_its_size():
    def program(x):
        with tf.device(ONE):
            y = tf.matmul(x, x, name="product")
        with tf.device(TWO):
            return tf.nn.relu(y)[0] + 1.0

    found = watched(program, tf.ones((4, 6)) @ tf.ones((6, 4)))
    (sent,) = [t for t in found.transfers if t.source == ONE and not t.control]
    assert (sent.tensor, sent.node) == ("product", "product")
    # TensorFlow may have replaced the operation by one of oneDNN's.
    assert re.fullmatch(PRODUCTS, sent.op)
    assert (sent.target, sent.dtype, sent.shape, sent.nbytes) == (TWO, "float32", (4, 4), 64)
    assert found.sent()[ONE, TWO] == 1


def test_a_tensor_that_two_operations_of_a_device_need_is_sent_once():
    def program(x):
        with tf.device(ONE):
            y = tf.matmul(x, x)
        with tf.device(TWO):
            return tf.nn.relu(y), tf.exp(y)

    assert watched(program, X).sent()[ONE, TWO] == 1


def test_what_is_sent_by_a_call_says_which_output():
    @kept_as_one_node
    def two(x):
        return tf.matmul(x, x), tf.exp(x)

    def program(x):
        with tf.device(ONE):
            first, second = two(x)
        with tf.device(TWO):
            return first, tf.nn.relu(second)

    found = watched(program, X)
    (sent,) = [t for t in found.transfers if (t.source, t.target) == (ONE, TWO)]
    assert sent.node in {n.name for n in found.nodes if "Call" in n.op}
    assert sent.tensor == f"{sent.node}:1"


def test_control_signals_are_no_tensors():
    with tf.device(ONE):
        variable = tf.Variable(0.0)

    def program(x):
        with tf.device(ONE):
            variable.assign_add(1.0)
        return tf.matmul(x, x)

    found = watched(program, X)
    assert found.count(ASSIGNMENTS) == {ONE: 1}
    (signal,) = [t for t in found.transfers if t.source == ONE]
    assert signal.control
    assert (signal.target, signal.nbytes) == ("/device:CPU:0", 0)
    assert found.sent() == {}


def test_the_body_of_a_call_runs_on_the_device_of_the_call():
    @kept_as_one_node
    def inner(x):
        return tf.matmul(x, x)

    @kept_as_one_node
    def outer(x):
        y = inner(x)
        with tf.device(THREE):
            return tf.exp(y)

    def program(x):
        with tf.device(TWO):
            return outer(x)

    found = watched(program, X)
    (product,) = [n for n in found.nodes if n.op == "MatMul"]
    assert product.device == TWO
    assert len(product.call.split("/")) == 2
    assert found.count("Exp") == {THREE: 1}


def test_that_rule_is_what_the_runtime_does():
    """A resource remembers the device of the operation that made it."""

    @kept_as_one_node
    def make():
        new = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="made_in_a_call")
        with tf.device(THREE):
            other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="made_on_3")
        return new, other

    handles = []

    def program():
        with tf.device(TWO):
            return make()

    step = tf.function(program, autograph=False)
    found = executed.largest(executed.watch(lambda: handles.extend(step())))
    assert found.count("VarHandleOp") == {TWO: 1, THREE: 1}
    made_on = [re.search(r'device="[^"]*(/device:CPU:\d)"', str(h)).group(1) for h in handles]
    assert made_on == [TWO, THREE]


def test_branches_and_loops_are_read():
    def program(x):
        with tf.device(TWO):
            y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.matmul(y, x)), (0, x))[1]
            return tf.cond(tf.reduce_sum(y) > 0, lambda: tf.matmul(y, y), lambda: tf.exp(y))

    found = watched(program, X)
    assert found.count(PRODUCTS) == {TWO: 2}


def test_only_first_calls_are_reported():
    program = tf.function(lambda x: tf.matmul(x, x))
    x = tf.ones((3, 3))
    assert executed.computing_devices(executed.watch(lambda: program(x))) == {"/device:CPU:0"}
    again = executed.watch(lambda: program(x))
    assert executed.computing_devices(again) == set()
    with pytest.raises(ValueError, match=r"first call only. Received: functions=\[\]"):
        executed.largest(again)


def test_an_error_ends_the_watching():
    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        executed.watch(fails)
    program = tf.function(lambda x: tf.matmul(x, x))
    program(X)
    assert executed.watch(lambda: None) == []


def test_the_benchmark_gives_numbers_of_devices():
    def program(x):
        with tf.device(ONE):
            y = tf.matmul(x, x)
        with tf.device(THREE):
            return tf.matmul(y, y)

    step = tf.function(program, autograph=False)
    assert compute_devices.compute_devices(lambda: step(X)) == {1, 3}


def test_products_and_assignments_under_all_their_names():
    for op in ("MatMul", "_MklFusedMatMul", "BatchMatMulV2", "Einsum", "Conv2DBackpropFilter"):
        assert re.fullmatch(PRODUCTS, op)
    for op in ("AssignVariableOp", "AssignSubVariableOp", "ResourceScatterAdd"):
        assert re.fullmatch(ASSIGNMENTS, op)
    assert not re.fullmatch(PRODUCTS, "Mul")
    assert not re.fullmatch(ASSIGNMENTS, "ReadVariableOp")


def test_backward_nodes_are_told_by_their_names():
    def program(x):
        with tf.device(TWO), tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.matmul(x, x))
        with tf.device(THREE):
            return tape.gradient(y, x)

    products = watched(program, X).select(PRODUCTS)
    assert {n.device for n in products if n.backward} == {THREE}
    assert len(products) > 1


def test_a_shape_that_is_not_known_has_no_bytes():
    assert ExecutedTransfer("a", "MatMul", ONE, TWO, "float32", None).nbytes is None
    assert ExecutedTransfer("a:2", "Call", ONE, TWO, "int64", (2, 3)).nbytes == 48
    assert ExecutedTransfer("a:2", "Call", ONE, TWO, "int64", (2, 3)).node == "a"


def test_counts_are_per_device():
    nodes = (
        ExecutedNode("a", "MatMul", ONE),
        ExecutedNode("b", "MatMul", ONE, "call"),
        ExecutedNode("c", "Exp", TWO),
    )
    function = ExecutedFunction(nodes, ())
    assert function.count("MatMul") == {ONE: 2}
    assert function.count("MatMul|Exp") == {ONE: 2, TWO: 1}
    assert function.count("Mat") == {}
    assert function.devices == (ONE, TWO)
