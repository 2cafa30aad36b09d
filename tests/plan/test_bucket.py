"""Buckets as data: what joins, in which order bytes lie."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.plan.bucket import Bucket, make_buckets
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import assign_owners
from kdist.sharding.placement import Placement, place

import numpy as np
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
    units = assign_owners(placements, [False] * count, mesh, [0 if cut else None] * count, together)
    return make_buckets(units, placements, keys, [not flat] * count), units


def test_cut_parameters_have_an_owner_in_every_slice() -> None:
    mesh = topology(data=2)
    (bucket,), units = buckets(mesh, [whole(mesh, 4, 2), whole(mesh, 2, 3)], ["k", "k"], cut=True)
    assert bucket.owners == ((0, 0), (1, 0))
    assert bucket.members == (0, 1) and bucket.sizes == [4, 3]
    assert [[units[n].span for n in each] for each in bucket.units] == [
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
    st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
            lambda sizes: st.tuples(st.just(sizes), st.integers(0, len(sizes) - 1))
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_matrix_has_the_part_of_each_owner(
    owners: int, members: list[tuple[list[int], int]]
) -> None:
    shapes = tuple(
        tuple(n * owners if i == dim else n for i, n in enumerate(sizes)) for sizes, dim in members
    )
    dims = tuple(dim for _, dim in members)
    coordinates = tuple((s, 0) for s in range(owners))
    bucket = Bucket(tuple(range(len(shapes))), (), coordinates, (), shapes, True, dims)
    random = np.random.default_rng(0)
    tensors = [random.normal(size=shape) for shape in shapes]
    vectors = bucket.messages(tensors)
    assert len(vectors) == owners
    for p, vector in enumerate(vectors):
        parts = [np.split(t, owners, dim)[p] for t, dim in zip(tensors, dims, strict=True)]
        for piece, expected in zip(bucket.pieces(vector), parts, strict=True):
            np.testing.assert_array_equal(piece, expected)
    for tensor, again in zip(tensors, bucket.split(tf.stack(vectors)), strict=True):
        np.testing.assert_array_equal(again, tensor)
