"""Views on rows of variables, as one vector, which own nothing."""

from __future__ import annotations

from typing import Any

from kdist.storage.flat_rows import FlatRows, Piece, flat_view
from kdist.storage.row_views import RowView

import keras
import numpy as np
import pytest
import tensorflow as tf


def test_a_flat_view_reads_and_writes_where_its_rows_lie() -> None:
    a = keras.Variable(np.arange(8.0).reshape(4, 2), name="a")
    b = keras.Variable(np.arange(3.0), name="b")
    view = flat_view(a, [(a, (slice(2, 4),)), (b, None)])
    np.testing.assert_array_equal(view, [4, 5, 6, 7, 0, 1, 2])
    view.assign(-tf.ones(7))
    np.testing.assert_array_equal(a, [[0, 1], [2, 3], [-1, -1], [-1, -1]])
    np.testing.assert_array_equal(b, [-1, -1, -1])


def test_a_flat_view_of_columns() -> None:
    a = keras.Variable(np.arange(8.0).reshape(2, 4), name="a")
    b = keras.Variable(np.arange(3.0), name="b")
    view = flat_view(a, [(a, (slice(0, 2), slice(1, 3))), (b, None)])
    np.testing.assert_array_equal(view, [1, 2, 5, 6, 0, 1, 2])
    view.assign(-tf.ones(7))
    np.testing.assert_array_equal(a, [[0, -1, -1, 3], [4, -1, -1, 7]])
    np.testing.assert_array_equal(b, [-1, -1, -1])


def test_a_flat_view_is_put_together_once_in_a_graph() -> None:
    a = keras.Variable(np.arange(4.0), name="a")
    rows = FlatRows([(a, (slice(0, 2),))])

    @tf.function
    def read() -> list[Any]:
        first, again = rows.whole(), rows.whole()
        assert first is again
        rows.assign(first + 1)
        return [first, rows.whole()]

    before, after = read()
    np.testing.assert_array_equal(after, before + 1)


def test_a_piece_is_a_part_in_its_shape() -> None:
    flat = keras.Variable(np.arange(7.0), name="flat")
    piece = Piece(flat, 1, (2, 2))
    np.testing.assert_array_equal(piece.value, [[1, 2], [3, 4]])
    piece.assign(np.zeros((2, 2)))
    np.testing.assert_array_equal(flat, [0, 0, 0, 0, 0, 5, 6])


def local(values: Any) -> keras.Variable:
    return keras.Variable(np.array(values, np.float32), name="local")


def test_rows_that_are_held_are_written_by_others() -> None:
    a = local([[0.0], [1.0], [2.0], [3.0]])
    rows = FlatRows([(a, (slice(0, 2),))])
    rows.hold()
    rows.assign(tf.constant([7.0, 8.0]))
    assert rows.whole().numpy().tolist() == [7.0, 8.0]
    assert a.value.numpy().ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    rows.release()
    assert rows.whole().numpy().tolist() == [0.0, 1.0]


def test_rows_are_held_in_one_graph_only() -> None:
    a = local([[0.0], [1.0]])
    rows = FlatRows([(a, (slice(0, 1),))])

    @tf.function
    def step() -> None:
        rows.hold()
        tf.cond(tf.constant(True), lambda: rows.assign(tf.constant([5.0])), lambda: None)
        rows.release()

    step()
    assert a.value.numpy().ravel().tolist() == [5.0, 1.0]


@pytest.mark.parametrize("method", ["scatter_update", "scatter_add", "scatter_sub"])
@pytest.mark.parametrize("held", [False, True])
def test_scattering_to_rows(method: str, held: bool) -> None:
    a = local([[0.0], [1.0], [2.0], [3.0]])
    rows = RowView(a, (slice(2, 4),))
    if held:
        rows.hold()
    rows.scatter(method, tf.IndexedSlices(tf.constant([[4.0]]), tf.constant([1])))
    expected = {"scatter_update": 4.0, "scatter_add": 7.0, "scatter_sub": -1.0}[method]
    assert rows.whole().numpy().ravel().tolist() == [2.0, expected]
    assert float(a.value[3, 0]) == (3.0 if held else expected)


@pytest.mark.parametrize("method", ["scatter_update", "scatter_add", "scatter_sub"])
@pytest.mark.parametrize("held", [False, True])
def test_scattering_to_rows_of_columns(method: str, held: bool) -> None:
    values = np.arange(24.0).reshape(3, 2, 4)
    a = local(values)
    part = RowView(a, (slice(0, 3), slice(0, 2), slice(1, 3)))
    if held:
        part.hold()
    new = np.array([[[4.0, 5.0], [6.0, 7.0]], [[1.0, 1.0], [2.0, 2.0]]], np.float32)
    part.scatter(method, tf.IndexedSlices(tf.constant(new), tf.constant([2, 0])))
    expected = values[:, :, 1:3].copy()
    old = expected[[2, 0]]
    change = {"scatter_update": new, "scatter_add": old + new, "scatter_sub": old - new}
    expected[[2, 0]] = change[method]
    np.testing.assert_array_equal(part.whole(), expected)
    np.testing.assert_array_equal(part.gather(tf.constant([1, 2])), expected[[1, 2]])
    if not held:
        values[:, :, 1:3] = expected
    np.testing.assert_array_equal(a, values)
