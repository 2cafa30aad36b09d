"""A part of a traced function as a function of its own."""

from __future__ import annotations

from typing import Any

from kdist._compat import said_shapes
from kdist.program.pruning import pruned

import numpy as np
import pytest
import tensorflow as tf

THREE = tf.TensorSpec((3,), tf.float32)


def traced(function: Any, *specs: Any) -> Any:
    return tf.compat.v1.wrap_function(function, list(specs))


def operation(function: Any, kind: str) -> Any:
    (found,) = [op for op in function.graph.get_operations() if op.type == kind]
    return found


def kinds(function: Any) -> list[str]:
    return sorted(op.type for op in function.graph.get_operations())


def test_what_lies_before_the_feeds_is_left_out() -> None:
    """Assertions too, which would run on inputs that nobody feeds."""

    def run(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(x) > 0, [x])]):
            between = tf.exp(tf.identity(x))
        return tf.sin(between) * y

    whole = traced(run, THREE, THREE)
    between = operation(whole, "Exp").outputs[0]
    made = pruned(whole, [whole.inputs[1], between], whole.outputs)
    assert kinds(made) == ["Mul", "Placeholder", "Placeholder", "Sin"]
    y, x = tf.constant([1.0, 2.0, 3.0]), tf.constant([0.1, 0.2, 0.3])
    np.testing.assert_allclose(made(y, x)[0], tf.sin(x) * y)


def test_what_a_part_waits_for_runs_with_it() -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        positive = tf.debugging.Assert(tf.reduce_all(x > 0), ["not positive"])
        with tf.control_dependencies([positive]):
            return tf.exp(x)

    whole = traced(run, THREE)
    made = pruned(whole, whole.inputs, whole.outputs)
    np.testing.assert_allclose(made(tf.ones(3))[0], np.e * np.ones(3), rtol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
        made(-tf.ones(3))


def test_feeds_may_be_fetched_and_given_and_returned_twice() -> None:
    whole = traced(lambda x: tf.exp(x), THREE)
    x, result = whole.inputs[0], whole.outputs[0]
    made = pruned(whole, [x, result], [result, x, result])
    assert kinds(made).count("Exp") == 0
    a, b, c = made(tf.ones(3), tf.zeros(3))
    assert a.numpy().tolist() == c.numpy().tolist() == [0.0] * 3
    assert b.numpy().tolist() == [1.0] * 3


def test_an_input_that_is_not_fed_is_refused() -> None:
    whole = traced(lambda x, y: x + tf.exp(y), THREE, tf.TensorSpec((3,), name="far"))
    with pytest.raises(ValueError, match="given all inputs that it depends on.*'far'"):
        pruned(whole, whole.inputs[:1], whole.outputs)


def test_captured_variables_and_called_functions_come_along() -> None:
    variable = tf.Variable([1.0, 2.0, 3.0])

    @tf.function(autograph=False)
    def inner(x: tf.Tensor) -> tf.Tensor:
        return 2 * x

    whole = traced(lambda x: inner(tf.exp(x)) + variable, THREE)
    made = pruned(whole, [operation(whole, "Exp").outputs[0]], whole.outputs)
    variable.assign_add([1.0, 1.0, 1.0])
    assert made(tf.ones(3))[0].numpy().tolist() == [4.0, 5.0, 6.0]
    # Of what is not needed, nothing is captured.
    part = pruned(whole, whole.inputs, [operation(whole, "Exp").outputs[0]])
    assert not part.captured_inputs


def test_lists_of_tensors_are_handed_on() -> None:
    """As those of a loop, of which the backward part reads what the forward part kept."""

    def run(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y)), (0, x))[1]
        return tape.gradient(y, x)

    whole = traced(run, THREE)
    first, second = (op for op in whole.graph.get_operations() if "While" in op.type)
    handed = [t for t in second.inputs if t.op is first]
    assert any(t.dtype == tf.variant for t in handed)
    front = pruned(whole, whole.inputs, handed)
    back = pruned(whole, [*whole.inputs, *handed], whole.outputs)
    assert sum("While" in kind for kind in kinds(back)) == 1
    x = tf.constant([0.1, 0.2, 0.3])
    np.testing.assert_array_equal(back(x, *front(x))[0], whole(x))
    assert back.outputs[0].shape == (3,)


def test_shapes_that_were_set_are_kept() -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        found = tf.boolean_mask(x, x > 0)
        found.set_shape((2,))
        return tf.exp(found)

    with said_shapes.noting():
        whole = traced(run, THREE)
    made = pruned(whole, whole.inputs, whole.outputs)
    assert made.outputs[0].shape == (2,)
    assert said_shapes.noted(made.graph)


def test_operations_keep_names_and_devices() -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("kdist_block_3_call_0"), tf.device("/CPU:1"):
            return tf.sin(tf.exp(x))

    whole = traced(run, THREE)
    with tf.device("/CPU:0"):
        made = pruned(whole, [operation(whole, "Exp").outputs[0]], whole.outputs)
    kept = operation(made, "Sin")
    assert kept.name == operation(whole, "Sin").name
    assert kept.device == operation(whole, "Sin").device
