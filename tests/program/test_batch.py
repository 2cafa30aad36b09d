"""Splitting a batch over replicas and joining it again loses, repeats and reorders nothing."""

from __future__ import annotations

from typing import Any

from kdist.program.batch import join, leading, part_bounds, split

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

sizes = st.integers(1, 40)
replica_counts = st.integers(1, 9)


@given(size=st.integers(0, 1000), replicas=st.integers(1, 64))
def test_bounds_tile_the_batch_evenly(size, replicas):
    bounds = part_bounds(size, replicas)
    assert len(bounds) == replicas
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
    counts = [b - a for a, b in bounds]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def used(batch: Any, position: int = 0) -> np.ndarray:
    """The rows that count, of one member of (x, y, sample_weight)."""
    parts = [part[position][: int(n)] for part, n in zip(batch.parts, batch.counts)]
    return np.concatenate([np.asarray(p) for p in parts])


@given(size=sizes, replicas=replica_counts)
@settings(deadline=None, max_examples=40)
def test_eager_split_then_join(size, replicas):
    x = tf.reshape(tf.range(size * 2), (size, 2))
    y = tf.range(size)
    batch = split(x, y, None, replicas)
    assert int(batch.size) == batch.static_size == size
    assert [int(n) for n in batch.counts] == [b - a for a, b in part_bounds(size, replicas)]
    assert batch.full == (size >= replicas)
    np.testing.assert_array_equal(used(batch), x)
    np.testing.assert_array_equal(used(batch, 1), y)
    np.testing.assert_array_equal(join([p[0] for p in batch.parts], batch.counts), x)
    assert all(p[2] is None for p in batch.parts)
    assert all(p[0].shape[0] >= 1 for p in batch.parts)


@tf.function(
    autograph=False,
    input_signature=[tf.TensorSpec((None, 2), tf.int32)],
)
def split_in_graph(x: tf.Tensor) -> Any:
    batch = split(x, None, None, 4)
    assert batch.static_size is None
    assert not batch.full
    parts = [p[0] for p in batch.parts]
    return parts, batch.counts, batch.size, join(parts, batch.counts)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
def test_split_of_unknown_size_in_a_graph(size):
    x = tf.reshape(tf.range(size * 2), (size, 2))
    parts, counts, total, joined = split_in_graph(x)
    expected = part_bounds(size, 4)
    assert int(total) == size
    assert [int(n) for n in counts] == [b - a for a, b in expected]
    for part, (a, b) in zip(parts, expected):
        # A replica without rows gets the last row as a stand-in.
        np.testing.assert_array_equal(part, x[a:b] if b > a else x[-1:])
    np.testing.assert_array_equal(joined, x)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_split_of_known_size_in_a_graph(size):
    @tf.function(autograph=False)
    def traced(x: tf.Tensor) -> Any:
        batch = split(x, None, None, 4)
        assert batch.static_size == size
        assert batch.full == (size >= 4)
        return join([p[0] for p in batch.parts], batch.counts)

    x = tf.reshape(tf.range(size * 2), (size, 2))
    np.testing.assert_array_equal(traced(x), x)


def test_even_parts_have_static_shapes():
    @tf.function(autograph=False, input_signature=[tf.TensorSpec((8, 3))])
    def traced(x: tf.Tensor) -> tf.Tensor:
        parts = split(x, None, None, 4).parts
        assert [p[0].shape for p in parts] == [(2, 3)] * 4
        return parts[0][0]

    traced(tf.zeros((8, 3)))


def test_one_replica_gets_the_batch_itself():
    x = tf.zeros((3, 2))
    batch = split(x, None, None, 1)
    assert batch.parts[0][0] is x
    assert batch.full


def test_structures_keep_their_form():
    x = {"a": tf.range(6), "b": (tf.range(6) * 2, tf.ones((6, 2)))}
    y = [tf.range(6), None]
    batch = split(x, y, tf.ones(6), 3)
    for part in batch.parts:
        assert set(part[0]) == {"a", "b"}
        assert isinstance(part[0]["b"], tuple)
        assert part[1][1] is None
        assert part[2].shape == (2,)
    joined = join([p[0] for p in batch.parts], batch.counts)
    np.testing.assert_array_equal(joined["b"][0], x["b"][0])


def test_leading_is_the_first_present_leaf():
    rows = np.zeros(7)
    assert leading({"a": None, "b": np.array(1.0), "c": rows}) is rows


@pytest.mark.parametrize("size", [2, 6, 8])
def test_sparse_rows(size):
    dense = np.arange(size * 3).reshape(size, 3) % 4
    batch = split(tf.sparse.from_dense(dense), tf.range(size), None, 4)
    for part, (a, b) in zip(batch.parts, part_bounds(size, 4)):
        expected = dense[a:b] if b > a else dense[-1:]
        np.testing.assert_array_equal(tf.sparse.to_dense(part[0]), expected)


def test_sparse_outputs_join_without_stand_ins():
    dense = np.array([[1, 0], [0, 2]])
    batch = split(tf.sparse.from_dense(dense), None, None, 4)
    joined = join([p[0] for p in batch.parts], batch.counts)
    np.testing.assert_array_equal(tf.sparse.to_dense(joined), dense)


@pytest.mark.parametrize("size", [2, 6, 8])
def test_ragged_rows(size):
    rows = [list(range(n + 1)) for n in range(size)]
    batch = split(tf.ragged.constant(rows), tf.range(size), None, 4)
    for part, (a, b) in zip(batch.parts, part_bounds(size, 4)):
        assert part[0].to_list() == (rows[a:b] if b > a else rows[-1:])
    joined = join([p[0] for p in batch.parts], batch.counts)
    assert joined.to_list() == rows
