"""Buckets as data: what joins, in which order bytes lie, and views that own nothing."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.plan.bucket import Bucket, FlatRows, Piece, flat_view, make_buckets
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import assign_owners
from kdist.sharding.placement import Placement, place
from kdist.storage.row_views import Rows

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st


def topology(**axes: int) -> Topology:
    return Topology.from_mesh(kdist.mesh(**axes))


def whole(mesh: Topology, *shape: int) -> Placement:
    return place("w", shape, 4, WeightLayout((None,) * len(shape)), mesh)


def buckets(
    mesh: Topology, placements: list[Placement], keys: list[Any], cut: bool, flat: bool = True
) -> tuple[list[Bucket], Any]:
    count = len(placements)
    together = None if cut else keys
    units = assign_owners(placements, [False] * count, mesh, [cut] * count, together)
    return make_buckets(units, placements, keys, [not flat] * count), units


def test_cut_parameters_have_an_owner_in_every_slice() -> None:
    mesh = topology(data=2)
    (bucket,), units = buckets(mesh, [whole(mesh, 4, 2), whole(mesh, 2, 3)], ["k", "k"], cut=True)
    assert bucket.owners == ((0, 0), (1, 0))
    assert bucket.members == (0, 1) and bucket.sizes == [4, 3]
    assert [[units[n].rows for n in each] for each in bucket.units] == [
        [(0, 2), (0, 1)],
        [(2, 4), (1, 2)],
    ]


def test_other_parameters_of_a_bucket_have_one_owner() -> None:
    mesh = topology(data=4)
    placements = [whole(mesh, 3), whole(mesh, 5), whole(mesh, 7), whole(mesh, 7)]
    found, units = buckets(mesh, placements, ["a", "a", "b", None], cut=False)
    # A unit alone is no bucket.
    assert [b.members for b in found] == [(0, 1)]
    assert units[0].owner == units[1].owner == found[0].owners[0]
    assert len({u.owner for u in units}) == 3


def test_keys_holders_and_rules_keep_apart() -> None:
    mesh = topology(data=2, model=2)
    cut = place("w", (4, 4), 4, WeightLayout((None, "model")), mesh)
    found, _ = buckets(mesh, [cut, cut, whole(mesh, 4)], ["k"] * 3, cut=False)
    # Both halves of the cut ones, each with its own holders.
    assert sorted(b.members for b in found) == [(0, 1), (0, 1)]
    assert {b.holders for b in found} == {(((0, 0), (1, 0)),), (((0, 1), (1, 1)),)}


def test_whole_tensors_travel_together_but_are_updated_apart() -> None:
    mesh = topology(data=2)
    (bucket,), _ = buckets(mesh, [whole(mesh, 3), whole(mesh, 5)], ["k"] * 2, cut=False, flat=False)
    assert not bucket.flat


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_a_matrix_has_the_rows_of_each_owner(owners: int, sizes: list[tuple[int, int]]) -> None:
    shapes = tuple((owners * rows, columns) for rows, columns in sizes)
    bucket = Bucket(
        tuple(range(len(shapes))), (), tuple((s, 0) for s in range(owners)), (), shapes, True
    )
    random = np.random.default_rng(0)
    tensors = [random.normal(size=shape) for shape in shapes]
    vectors = bucket.messages(tensors)
    assert len(vectors) == owners
    for p, vector in enumerate(vectors):
        rows = [np.split(t, owners)[p] for t in tensors]
        for piece, expected in zip(bucket.pieces(vector), rows, strict=True):
            np.testing.assert_array_equal(piece, expected)
    for tensor, again in zip(tensors, bucket.split(tf.stack(vectors)), strict=True):
        np.testing.assert_array_equal(again, tensor)


def test_a_flat_view_reads_and_writes_where_its_rows_lie() -> None:
    a = keras.Variable(np.arange(8.0).reshape(4, 2), name="a")
    b = keras.Variable(np.arange(3.0), name="b")
    view = flat_view(a, [(a, slice(2, 4)), (b, None)])
    np.testing.assert_array_equal(view, [4, 5, 6, 7, 0, 1, 2])
    view.assign(-tf.ones(7))
    np.testing.assert_array_equal(a, [[0, 1], [2, 3], [-1, -1], [-1, -1]])
    np.testing.assert_array_equal(b, [-1, -1, -1])


def test_a_flat_view_is_put_together_once_in_a_graph() -> None:
    a = keras.Variable(np.arange(4.0), name="a")
    rows = FlatRows([(a, slice(0, 2))])

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
    rows = FlatRows([(a, slice(0, 2))])
    rows.hold()
    rows.assign(tf.constant([7.0, 8.0]))
    assert rows.whole().numpy().tolist() == [7.0, 8.0]
    assert a.value.numpy().ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    rows.release()
    assert rows.whole().numpy().tolist() == [0.0, 1.0]


def test_rows_are_held_in_one_graph_only() -> None:
    a = local([[0.0], [1.0]])
    rows = FlatRows([(a, slice(0, 1))])

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
    rows = Rows(a, 2, 4)
    if held:
        rows.hold()
    rows.scatter(method, tf.IndexedSlices(tf.constant([[4.0]]), tf.constant([1])))
    expected = {"scatter_update": 4.0, "scatter_add": 7.0, "scatter_sub": -1.0}[method]
    assert rows.whole().numpy().ravel().tolist() == [2.0, expected]
    assert float(a.value[3, 0]) == (3.0 if held else expected)
