"""A function is expanded for a mesh without running it, and inputs and results are told apart."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from kdist.dtensor import relayout
from kdist.dtensor.lowered_program import Function
from kdist.dtensor.lowering import abstract_mesh, lower
from kdist.dtensor.sharded import Sharded
from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, lowered_program, run, whole

X = np.arange(32.0).reshape(4, 8)


def test_devices_need_not_exist_and_nothing_is_allocated() -> None:
    mesh = abstract_mesh({"model": 512})
    rows = dtensor.Layout(["model", dtensor.UNSHARDED], mesh)
    spec = tf.TensorSpec((2**20, 2**12))  # 16 GiB
    concrete = tf.function(lambda x: tf.reduce_sum(x * 2.0)).get_concrete_function(spec)
    with relayout.lowering(mesh):
        program = lower(Function.of(concrete), mesh, [rows])
    assert program.size == 512
    (one,) = program.collectives
    assert (one.kind, one.axis, one.bytes) == ("all-reduce", ("model",), 4)


def test_inputs_and_results_are_told_apart() -> None:
    """Unused and repeated inputs; results that are inputs, constants, equal, or computed alike."""
    mesh, _ = inner_mesh(a=2, b=2)

    def function(x: Any, unused: Any, y: Any, count: Any) -> Any:
        first, again = tf.tanh(y + x), tf.tanh(y + x)
        return {
            "z": [first, again, first, x, y, None],
            "a": (tf.constant(7.0, tf.float64), tf.constant(7.0, tf.float64), count, count + 1),
        }

    x, y = cut(X, mesh, "a", None), cut(2 * X, mesh, "a", "b")
    count = cut(np.array(3, np.int32), mesh)
    found, program = run(mesh, function, x, cut(X, mesh, None, "b"), y, count)
    expected = function(*map(tf.constant, (X, X, 2 * X, np.int32(3))))
    assert found["z"][5] is None
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        if one is not None:
            np.testing.assert_allclose(whole(one), other)
    assert {one.position for one in program.arguments} - {None} == {0, 2, 3}


def test_an_input_of_which_only_a_layout_is_read() -> None:
    """A look-up with constant indices in a backward pass: DTensor keeps the parameter, untagged."""
    mesh, _ = inner_mesh(a=2, b=2)

    def function(table: Any, rows: Any) -> Any:
        return dtensor.relayout_like(rows + 1, tf.gather(table, [3, 0, 2]))

    rows = np.arange(24.0).reshape(3, 8)
    found, program = run(mesh, function, cut(X, mesh, None, "b"), cut(rows, mesh, None, None))
    np.testing.assert_array_equal(whole(found), rows + 1)
    assert {0, 1} <= {one.position for one in program.arguments}


def test_captures_are_further_inputs() -> None:
    mesh, _ = inner_mesh(model=2)
    captured = tf.constant(np.arange(200.0))  # too many to become a constant of the graph
    concrete = tf.function(lambda x: x + captured).get_concrete_function(
        tf.TensorSpec((200,), tf.float64)
    )
    program = lower(Function.of(concrete), mesh, [dtensor.Layout.replicated(mesh, 1)] * 2)
    assert sorted(one.position or 0 for one in program.arguments) == [0, 1]


def test_what_dtensor_cannot_expand_is_an_error_and_the_next_is_not() -> None:
    mesh, _ = inner_mesh(model=2)
    filters = cut(np.ones((3, 4, 4)), mesh, None, None, "model")
    x = cut(np.ones((2, 5, 4)), mesh, None, None, None)
    with pytest.raises((tf.errors.OpError, ValueError)):
        lowered_program(
            mesh, lambda x, f: tf.nn.conv1d(x, f, 1, "VALID"), x, filters, islands=False
        )
    result, _ = run(mesh, lambda x: x + 1.0, x)
    np.testing.assert_array_equal(whole(result), np.full((2, 5, 4), 2.0))


def test_parts_say_what_they_are_parts_of() -> None:
    mesh, _ = inner_mesh(a=2, b=2)
    for dims in ((None, None), ("a", None), (None, "b"), ("b", "a")):
        one = cut(X, mesh, *dims)
        assert isinstance(one, Sharded)
        assert one.shape == (4, 8) and one.dtype == tf.float64
        np.testing.assert_array_equal(whole(one), X)


def test_work_grows_with_the_program_and_no_faster() -> None:
    """Twice the layers are twice the nodes; what is done with each must not depend on the others.

    Counted, not timed: calls of kdist's functions from the traced function to its copies.
    """
    mesh, topology = inner_mesh(model=2)
    x = cut(np.ones((4, 8)), mesh, None, None)
    w = cut(np.ones((8, 8)), mesh, None, "model")

    def calls(layers: int) -> int:
        def gradient(x: Any, weights: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(weights)
                for one in weights:
                    x = tf.tanh(tf.matmul(x, one))
                loss = tf.reduce_sum(x)
            return tape.gradient(loss, weights)

        counted = itertools.count()

        def count(frame: Any, event: str, _: Any) -> None:
            if event == "call" and "/kdist/" in frame.f_code.co_filename:
                next(counted)

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            program = lowered_program(mesh, gradient, x, [w] * layers)
            Stitcher(program).stitch(topology.slices[0].devices)
        finally:
            sys.setprofile(before)
        return next(counted)

    assert calls(20) < 2.3 * calls(10)


def test_a_program_that_takes_nothing() -> None:
    mesh, _ = inner_mesh(a=2)
    found, program = run(mesh, lambda: tf.range(3))
    assert not [one for one in program.arguments if one.position is not None]
    assert [part.numpy().tolist() for part in found.parts] == [[0, 1, 2]] * 2
