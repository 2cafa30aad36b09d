"""Forward and backward halves cut from one trace: what they compute, and what they keep."""

from __future__ import annotations

from typing import Any

from kdist.program.vjp import CapturesVariables, Vjp, dependencies

import numpy as np
import pytest
import tensorflow as tf

W, B, X = (4, 3), (3,), (5, 4)


def specs(*shapes: tuple[int, ...], dtype: Any = tf.float64) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(shape, dtype) for shape in shapes]


def values(*shapes: tuple[int, ...]) -> list[tf.Tensor]:
    random = np.random.default_rng(0)
    return [tf.constant(random.normal(size=shape)) for shape in shapes]


def dense(params: list[Any], inputs: list[Any]) -> list[Any]:
    return [tf.tanh(inputs[0] @ params[0] + params[1])]


def gradients(function: Any, params: list[Any], inputs: list[Any], cotangents: list[Any]) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([*params, *inputs])
        outputs = function(params, inputs)
    return tape.gradient(outputs, [*params, *inputs], output_gradients=cotangents)


def assert_same(left: Any, right: Any) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(tf.convert_to_tensor(a), tf.convert_to_tensor(b), rtol=1e-12)


def halves(function: Any, params: list[Any], inputs: list[Any]) -> tuple[Vjp, list[Any], list[Any]]:
    vjp = Vjp(
        function,
        [tf.TensorSpec(p.shape, p.dtype) for p in params],
        [tf.TensorSpec(x.shape, x.dtype) for x in inputs],
        lambda f, late=(): f,
    )
    vjp.cut()
    outputs, saved = vjp.forward(params, inputs)
    return vjp, outputs, saved


def test_halves_are_the_function_and_its_gradient() -> None:
    params, inputs = values(W, B), values(X)
    vjp, outputs, saved = halves(dense, params, inputs)
    assert_same(outputs, dense(params, inputs))
    cotangents = values((5, 3))
    found = vjp.backward(params, saved, cotangents)
    assert_same([*found[0], *found[1]], gradients(dense, params, inputs, cotangents))


def test_what_follows_from_parameters_alone_is_not_kept() -> None:
    def cast(params: list[Any], inputs: list[Any]) -> list[Any]:
        half = tf.cast(tf.transpose(params[0]), tf.float32)
        return [tf.cast(inputs[0], tf.float32) @ tf.transpose(half)]

    vjp, _, saved = halves(cast, values(W), values(X))
    # The gradients of a product need the inputs and the (cast) kernel; the latter is made again.
    assert [tuple(t.shape) for t in saved] == [X]
    assert all(spec.shape == t.shape for spec, t in zip(vjp.saved, saved, strict=True))


def test_a_linear_function_keeps_nothing_for_its_inputs() -> None:
    _, _, saved = halves(lambda params, inputs: [inputs[0] + params[0]], values((4,)), values(X))
    assert saved == []


def test_what_is_drawn_is_drawn_once() -> None:
    def noisy(params: list[Any], inputs: list[Any]) -> list[Any]:
        return [inputs[0] + params[0] * tf.random.normal((4,), dtype=tf.float64)]

    tf.random.set_seed(None)  # with one, each of two operations would draw the same
    params, inputs = values((4,)), [tf.zeros(X, tf.float64)]
    vjp, (output,), saved = halves(noisy, params, inputs)
    found, _ = vjp.backward(params, saved, [tf.ones(X, tf.float64)])
    assert_same([found[0] * params[0]], [tf.reduce_sum(output, 0)])


def test_unused_parameters_and_inputs_have_no_gradient() -> None:
    params, inputs = values(W, B, B), values(X, X)
    vjp, _, saved = halves(dense, params, inputs)
    of_params, of_inputs = vjp.backward(params, saved, values((5, 3)))
    assert of_params[2] is None and of_inputs[1] is None


def test_integer_outputs_take_no_cotangent() -> None:
    def both(params: list[Any], inputs: list[Any]) -> list[Any]:
        return [tf.argmax(inputs[0], 1), inputs[0] @ params[0]]

    params, inputs = values(W), values(X)
    vjp, _, saved = halves(both, params, inputs)
    assert [vjp.takes_cotangent(i) for i in (0, 1)] == [False, True]
    (cotangent,) = values((5, 3))
    found = vjp.backward(params, saved, [None, cotangent])
    assert_same(
        found[0] + found[1], gradients(lambda p, x: both(p, x)[1:], params, inputs, [cotangent])
    )


def test_rows_of_a_table_stay_rows() -> None:
    def look_up(params: list[Any], inputs: list[Any]) -> list[Any]:
        return [tf.gather(params[0], inputs[0])]

    params, inputs = values((7, 2)), [tf.constant([1, 3, 1])]
    vjp, _, saved = halves(look_up, params, inputs)
    (rows,), _ = vjp.backward(params, saved, values((3, 2)))
    assert isinstance(rows, tf.IndexedSlices)
    np.testing.assert_array_equal(rows.indices, [1, 3, 1])
    assert vjp.rows == {0: ([0], False, 0)}


def test_a_loop_is_cut_too() -> None:
    def loop(params: list[Any], inputs: list[Any]) -> list[Any]:
        def body(i: Any, h: Any) -> tuple[Any, Any]:
            return i + 1, tf.tanh(h @ params[0])

        return [tf.while_loop(lambda i, h: i < 3, body, [0, inputs[0]])[1]]

    params, inputs = values((4, 4)), values(X)
    vjp, outputs, saved = halves(loop, params, inputs)
    assert_same(outputs, loop(params, inputs))
    cotangents = values(X)
    found = vjp.backward(params, saved, cotangents)
    assert_same(found[0] + found[1], gradients(loop, params, inputs, cotangents))


@pytest.mark.parametrize("kept", [0, 1])
def test_of_an_operation_with_several_outputs_one_may_be_kept(kept: int) -> None:
    def both(params: list[Any], inputs: list[Any]) -> list[Any]:
        halves = tf.split(inputs[0] * params[0], 2, axis=1)
        # Of one half the gradient needs the value, of the other only what follows from it.
        return [tf.square(halves[kept]) * tf.tanh(tf.transpose(tf.transpose(halves[1 - kept])))]

    params, inputs = values(X), values(X)
    vjp, outputs, saved = halves(both, params, inputs)
    assert_same(outputs, both(params, inputs))
    cotangents = values((5, 2))
    found = vjp.backward(params, saved, cotangents)
    assert_same(found[0] + found[1], gradients(both, params, inputs, cotangents))


def test_other_variables_are_refused() -> None:
    variable = tf.Variable(1.0)
    with pytest.raises(CapturesVariables):
        Vjp(lambda p, x: [x[0] * variable], [], specs((2,), dtype=tf.float32), lambda f, late=(): f)


def test_dependencies_are_on_inputs() -> None:
    with tf.Graph().as_default() as graph:
        param, inputs = tf.compat.v1.placeholder(tf.float32), tf.compat.v1.placeholder(tf.float32)
        alone, both = tf.square(param), tf.square(param) * inputs
        found = dependencies(graph, [param], [inputs])
    assert not found[alone.op.name] and found[both.op.name]
