"""Loops over rows, as `tf.map_fn` makes them: of a row alone, or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.rows import RowDependence, study
from kdist.rows.mapped import mapped_by_loop

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

SEQUENCES = tf.TensorSpec((None, 5, 3))
WEIGHTS = tf.constant([1.0, 2.0, 3.0])


def rows(x: Any) -> Any:
    return tf.shape(x)[0]


APART: dict[str, Callable] = {
    "an element": lambda x: tf.map_fn(lambda one: tf.reduce_max(one, 0) * WEIGHTS, x),
    "keras": lambda x: ops.map(lambda one: ops.max(one, axis=0), x),
    "two lists": lambda x: tf.map_fn(
        lambda pair: tf.concat(pair, 0), (x, 2 * x), fn_output_signature=tf.float32
    ),
    "two results": lambda x: tf.map_fn(
        lambda one: (one * 2, one + 1), x, fn_output_signature=(tf.float32, tf.float32)
    )[1],
    "a branch": lambda x: tf.map_fn(
        lambda one: tf.cond(tf.reduce_sum(one) > 0, lambda: one, lambda: -one), x
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_done_to_each_row_keeps_rows_apart(name: str) -> None:
    function = APART[name]
    found = study(function, SEQUENCES)
    assert found.outputs == (RowDependence.ROWS,) and found.mixings == ()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 5, 3)), tf.float32)
    one_by_one = [function(x[i : i + 1]) for i in range(4)]
    np.testing.assert_allclose(function(x), tf.concat(one_by_one, 0), rtol=1e-6)


MIXED: dict[str, Callable] = {
    "divided by their number": lambda x: tf.map_fn(lambda one: one / tf.cast(rows(x), x.dtype), x),
    "less the mean": lambda x: tf.map_fn(lambda one: one - tf.reduce_mean(x, 0), x),
    "of others": lambda x: tf.map_fn(lambda one: one, tf.reverse(x, [0])),
    "of some": lambda x: tf.map_fn(lambda one: one, x[:3]),
    "with its number": lambda x: tf.map_fn(
        lambda pair: pair[0] + tf.cast(pair[1], x.dtype),
        (x, tf.range(rows(x))),
        fn_output_signature=tf.float32,
    ),
    "from row to row": lambda x: tf.scan(lambda before, one: before + one, x),
    "looked up": lambda x: tf.map_fn(
        lambda i: x[rows(x) - 1 - i], tf.range(rows(x)), fn_output_signature=tf.float32
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_is_done_to_all_does_not(name: str) -> None:
    found = study(MIXED[name], SEQUENCES)
    assert found.outputs == (RowDependence.MIXED,) and found.mixings


def test_mapped_by_loop() -> None:
    def mapped(x: Any) -> Any:
        return tf.map_fn(lambda one: one * WEIGHTS, x)

    graph = tf.compat.v1.wrap_function(mapped, [tf.TensorSpec((7, 5, 3))]).graph
    (stack,) = (op for op in graph.get_operations() if op.type == "TensorListStack")
    found = mapped_by_loop(stack, 7)
    assert found is not None and found.loop is stack.inputs[0].op
    assert [one.type for one in found.lists] == ["TensorListFromTensor"]
    assert mapped_by_loop(stack, 6) is None
