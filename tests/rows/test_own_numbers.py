"""Rows that look into themselves by their own number keep apart; others that look alike do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.rows import RowDependence, study
from kdist.rows.numbers import fixed
from kdist.rows.own_numbers import choice_after_own_number

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

SEQUENCES = tf.TensorSpec((None, 5, 3))


def largest(x: Any) -> Any:
    """Where each row is largest."""
    return tf.argmax(x[:, :, 0], axis=1, output_type=tf.int32)


def stacked(x: Any) -> Any:
    return tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), largest(x)], axis=1))


def by_keras(x: Any) -> Any:
    indices = ops.stack([ops.arange(ops.shape(x)[0]), ops.cast(largest(x), "int32")], axis=1)
    return tf.gather_nd(x, indices)


def several(x: Any) -> Any:
    chosen = tf.cast(tf.argsort(x[:, :, 0], axis=1)[:, :2], tf.int32)
    own = tf.tile(tf.range(tf.shape(x)[0])[:, None], [1, 2])
    return tf.gather_nd(x, tf.stack([own, chosen], axis=-1))


def broadcast(x: Any) -> Any:
    chosen = tf.cast(tf.argsort(x[:, :, 0], axis=1)[:, :2], tf.int32)
    own = tf.broadcast_to(tf.range(tf.shape(x)[0])[:, tf.newaxis], tf.shape(chosen))
    return tf.gather_nd(x, tf.stack([own, chosen], axis=-1))


def concatenated(x: Any) -> Any:
    return tf.gather_nd(x, tf.concat([tf.range(tf.shape(x)[0])[:, None], largest(x)[:, None]], 1))


def of_wide_numbers(x: Any) -> Any:
    indices = tf.stack([tf.range(tf.shape(x)[0]), largest(x)], axis=1)
    return tf.gather_nd(x, tf.cast(indices, tf.int64))


def alike(x: Any) -> Any:
    rows = tf.shape(x)[0]
    return tf.gather_nd(x, tf.stack([tf.range(rows), tf.fill([rows], 2)], axis=1))


def own_place(x: Any) -> Any:
    return tf.stack([tf.range(tf.shape(x)[0]), largest(x)], axis=1)


def written(x: Any) -> Any:
    return tf.tensor_scatter_nd_update(x, own_place(x), x[:, 0])


def added(x: Any) -> Any:
    return tf.tensor_scatter_nd_add(tf.zeros_like(x), own_place(x), x[:, 0])


def scattered(x: Any) -> Any:
    return tf.scatter_nd(own_place(x), x[:, 0], tf.shape(x))


def of_keras(x: Any) -> Any:
    return ops.slice_update(x, (0, 2, 0), x[:, :1])


@pytest.mark.parametrize(
    "function",
    [
        stacked,
        by_keras,
        several,
        broadcast,
        concatenated,
        of_wide_numbers,
        alike,
        written,
        added,
        scattered,
        of_keras,
    ],
)
def test_a_row_that_looks_into_itself_keeps_apart(function: Callable) -> None:
    found = study(function, SEQUENCES)
    assert found.outputs == (RowDependence.ROWS,) and found.mixings == ()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 5, 3)), tf.float32)
    one_by_one = [function(x[i : i + 1]) for i in range(4)]
    np.testing.assert_array_equal(function(x), tf.concat(one_by_one, 0))


def reversed_numbers(x: Any) -> Any:
    return tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0])[::-1], largest(x)], axis=1))


def next_numbers(x: Any) -> Any:
    rows = tf.shape(x)[0]
    return tf.gather_nd(x, tf.stack([(tf.range(rows) + 1) % rows, largest(x)], axis=1))


def behind(x: Any) -> Any:
    return tf.gather_nd(x, tf.stack([largest(x), tf.range(tf.shape(x)[0])], axis=1))


def chosen_by_others(x: Any) -> Any:
    other = largest(tf.reverse(x, [0]))
    return tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), other], axis=1))


def of_others(x: Any) -> Any:
    indices = tf.stack([tf.range(tf.shape(x)[0]), largest(x)], axis=1)
    return tf.gather_nd(tf.reverse(x, [0]), indices)


def used_again(x: Any) -> Any:
    indices = tf.stack([tf.range(tf.shape(x)[0]), largest(x)], axis=1)
    return tf.gather_nd(x, indices) + tf.cast(tf.reduce_sum(indices), x.dtype)


def writes_the_first(x: Any) -> Any:
    return ops.slice_update(x, (0, 0, 0), tf.ones((1, 5, 3)))


def writes_of_others(x: Any) -> Any:
    return tf.tensor_scatter_nd_update(x, own_place(x), x[::-1, 0])


def writes_what_differs(x: Any) -> Any:
    rows = tf.shape(x)[0]
    numbers = tf.tile(tf.cast(tf.range(rows), x.dtype)[:, None], [1, 3])
    return tf.tensor_scatter_nd_update(x, own_place(x), numbers)


def scattered_elsewhere(x: Any) -> Any:
    return tf.scatter_nd(own_place(x), x[:, 0], [2 * tf.shape(x)[0], 5, 3])


@pytest.mark.parametrize(
    "function",
    [
        reversed_numbers,
        next_numbers,
        behind,
        chosen_by_others,
        of_others,
        used_again,
        writes_the_first,
        writes_of_others,
        writes_what_differs,
        scattered_elsewhere,
    ],
)
def test_what_only_looks_like_it_does_not(function: Callable) -> None:
    found = study(function, SEQUENCES)
    assert found.outputs == (RowDependence.MIXED,) and found.mixings


def test_choice_after_own_number() -> None:
    with tf.Graph().as_default():
        chosen = tf.compat.v1.placeholder(tf.int32, (7,))
        joined = tf.stack([tf.range(7), chosen], axis=1)
        tf.identity(joined)
        found = choice_after_own_number(joined, 7)
        assert found is not None and found[0] is joined.op
        assert [part.name for part in found[1]] == [chosen.name]
        assert choice_after_own_number(joined, 6) is None
        assert choice_after_own_number(chosen, 7) is None


SLICES: dict[str, Callable] = {
    "a part": lambda x: x[1:3],
    "backwards": lambda x: x[::-1],
    "one": lambda x: x[2],
    "a new dim": lambda x: x[:, None],
    "before": lambda x: x[tf.newaxis, 1:],
    "the last": lambda x: x[..., -1],
}


@pytest.mark.parametrize("name", SLICES)
def test_fixed_numbers_of_a_slice(name: str) -> None:
    with tf.Graph().as_default():
        size = tf.shape(tf.compat.v1.placeholder(tf.float32, (5, 2)))[0]
        found = fixed(SLICES[name](tf.range(size)))
    np.testing.assert_array_equal(found, SLICES[name](tf.range(5)))
