"""Every internal behind `kdist._compat.custom_gradients` is there and does what is expected."""

from __future__ import annotations

from typing import Any

from kdist._compat import custom_gradients

import keras
import pytest
import tensorflow as tf


@tf.custom_gradient
def doubled(x: Any) -> Any:
    return x, lambda d: 2.0 * d


@pytest.mark.parametrize("eager", [True, False])
def test_run_by(eager: bool) -> None:
    seen = []

    def instead(run: Any, function: Any, args: Any, kwargs: Any) -> Any:
        seen.append(function.__name__)
        return run(lambda x: (x, lambda d: 3.0 * d), args, kwargs)

    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = doubled(x)
        return tape.gradient(y, x)

    def of_one() -> float:
        function = slope if eager else tf.function(slope, autograph=False)
        return float(function(tf.constant(1.0)))

    with custom_gradients.run_by(instead):
        assert of_one() == 3.0
    assert seen == ["doubled"]
    assert of_one() == 2.0


def test_is_of_library() -> None:
    assert custom_gradients.is_of_library(tf.nn.silu)
    assert custom_gradients.is_of_library(keras.activations.relu)
    assert not custom_gradients.is_of_library(test_is_of_library)


def test_is_recorded() -> None:
    weight, given = tf.Variable(2.0), tf.constant(3.0)
    found = []

    def look(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = weight * x
            found.append([custom_gradients.is_recorded(t) for t in (weight.handle, x, y)])
            with tape.stop_recording():
                found.append([custom_gradients.is_recorded(t) for t in (weight.handle, y)])
        found.append([custom_gradients.is_recorded(t) for t in (weight.handle, x, y)])
        return y

    for run in (look, tf.function(look, autograph=False)):
        found.clear()
        run(given)
        assert found == [[True, False, True], [False, False], [False, False, False]]


def test_asked_by_graph() -> None:
    found = []

    @tf.custom_gradient
    def noted(x: Any) -> Any:
        return x, lambda d: (found.append(custom_gradients.asked_by_graph()), d)[1]

    def by_tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = noted(x)
        return tape.gradient(y, x)

    called = tf.function(lambda x: noted(x), autograph=False)

    def of_function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = called(x)
        return tape.gradient(y, x)

    for run in (by_tape, lambda x: tf.gradients(noted(x), x)[0], of_function):
        tf.function(run, autograph=False)(tf.constant(1.0))
    assert found[0] is False and found[1:] and all(found[1:])


def test_without_content() -> None:
    """A tape finds gradients by its handle, through functions too; nothing is stored."""
    anchor = custom_gradients.without_content((2, 3), "float64")
    assert not anchor.is_initialized() and anchor.shape == (2, 3)

    @tf.custom_gradient
    def made(handle: Any) -> Any:
        return tf.ones((2, 3), tf.float64), lambda d: 2.0 * d

    def slope(call: Any) -> Any:
        with tf.GradientTape() as tape:
            custom_gradients.watched(anchor)
            y = call(anchor.handle)
        return tape.gradient(y, anchor)

    called = tf.function(lambda handle: made(handle), autograph=False)

    def in_graph(call: Any) -> Any:
        return tf.function(lambda: slope(call), autograph=False)()

    for run in (slope, in_graph):
        assert run(made).numpy().tolist() == run(called).numpy().tolist() == [[2.0] * 3] * 2


def test_watched() -> None:
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        custom_gradients.watched(variable)
        assert [v is variable for v in tape.watched_variables()] == [True]


def test_watched_in_a_function() -> None:
    """What a function notes, tapes of its callers watch."""
    variable, seen = tf.Variable(1.0), []

    @tf.function(autograph=False)
    def inside() -> Any:
        custom_gradients.watched(variable, lasts=True)
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)

    with tf.GradientTape() as tape:
        value = inside()
        seen = [v is variable for v in tape.watched_variables()]
    assert seen == [True]
    assert float(tape.gradient(value, variable)) == 1.0


@pytest.mark.parametrize("where", ["eager", "graph", "branch", "loop"])
def test_read_of(where: str) -> None:
    anchor = custom_gradients.without_content((3, 2), "float32")
    value = tf.reshape(tf.range(6, dtype=tf.float32), (3, 2))

    def read() -> Any:
        return tf.reduce_sum(custom_gradients.read_of(anchor, value)[1] ** 2)

    def gradient() -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(anchor)
            if where == "branch":
                found = tf.cond(tf.constant(True), read, lambda: 0.0)
            elif where == "loop":
                body = lambda i, found: (i + 1, found + read())  # noqa: E731
                found = tf.while_loop(lambda i, _: i < 1, body, (0, 0.0))[1]
            else:
                found = read()
        return tf.convert_to_tensor(tape.gradient(found, anchor))

    run = gradient if where == "eager" else tf.function(gradient)
    assert run().numpy().tolist() == [[0, 0], [4, 6], [0, 0]]


def test_standing_for() -> None:
    """The equal takes the tensor's gradient; what it is made of gets its own alone."""

    @tf.function
    def slopes(logits: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(logits)
            tensor = 2.0 * logits
            made = custom_gradients.standing_for(tensor, lambda: tf.nn.softmax(logits))
            loss = tf.reduce_sum(3.0 * made) + tf.reduce_sum(made.op.inputs[0])
        return tape.gradient(loss, tensor), tape.gradient(loss, logits)

    of_tensor, of_logits = slopes(tf.constant([0.5, 1.0]))
    assert of_tensor.numpy().tolist() == [3.0, 3.0]
    assert of_logits.numpy().tolist() == [7.0, 7.0]


@pytest.mark.parametrize("called", [False, True])
def test_taped_python(called: bool) -> None:
    """Those that are differentiated, in the graph and in what it calls."""

    def python(x: Any) -> Any:
        return tf.ensure_shape(tf.py_function(tf.tanh, [x], x.dtype), x.shape)

    inner = tf.function(python, autograph=False) if called else python

    def traced(x: Any, differentiate: bool) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x)
        return tape.gradient(y, x) if differentiate else y

    def found(differentiate: bool) -> list[str]:
        function = tf.function(lambda x: traced(x, differentiate), autograph=False)
        graph = function.get_concrete_function(tf.TensorSpec((3,))).graph
        return [name.rpartition("/")[2] for name in custom_gradients.taped_python(graph)]

    assert found(False) == []
    assert set(found(True)) == {"EagerPyFunc"}
