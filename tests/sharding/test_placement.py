"""Placement is pure arithmetic: parts tile each variable, and every part has one owner."""

from __future__ import annotations

import itertools
import math
from typing import Any

import kdist
from kdist.sharding.layout import resolve_layouts
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import assign_owners
from kdist.sharding.placement import (
    Placement,
    coordinate_of,
    covers,
    overlap,
    place,
    relative,
)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

AXES = [
    {"data": 4},
    {"data": 2, "model": 2},
    {"model": 4},
    {"data": 2, "row": 2, "col": 2},
    {"model": 2, "data": 3},
]
TOPOLOGIES = [Topology.from_mesh(kdist.mesh(**axes)) for axes in AXES]


def make(shape: tuple[int, ...], dims: tuple, topology: Topology) -> Placement:
    layouts, _ = resolve_layouts([("w", shape)], {"w": dims}, topology)
    return place("w", shape, 4, layouts[0], topology)


@st.composite
def placed(draw: Any) -> tuple[Placement, Topology]:
    """A variable whose dims any axes cut, on any of the meshes."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    axes = draw(st.permutations(topology.axis_names))
    rank = draw(st.integers(1, 3))
    cuts: list[tuple[str, ...]] = [()] * rank
    for axis in axes[: draw(st.integers(0, len(axes)))]:
        dim = draw(st.integers(0, rank - 1))
        if axis == topology.data_axis and cuts[dim]:
            continue
        if topology.data_axis in cuts[dim]:
            continue
        cuts[dim] += (axis,)
    shape = tuple(
        math.prod(topology.axis_size(a) for a in cut) * draw(st.integers(1, 3)) for cut in cuts
    )
    dims = tuple(None if not c else c[0] if len(c) == 1 else c for c in cuts)
    return make(shape, dims, topology), topology


def every(topology: Topology) -> list[tuple[int, int]]:
    return list(itertools.product(range(topology.data_size), range(topology.inner_size)))


@given(placed())
@settings(deadline=None, max_examples=150)
def test_shards_tile_the_variable(case):
    placement, topology = case
    count = np.zeros(placement.shape, int)
    for shard in placement.shards:
        count[shard.index] += 1
        assert count[shard.index].shape == shard.shape
    assert (count == 1).all()
    holders = [c for shard in placement.shards for c in shard.holders]
    assert sorted(holders) == every(topology)
    for c in every(topology):
        assert c in placement.shard_at(c).holders


@given(placed())
@settings(deadline=None, max_examples=100)
def test_compute_sees_the_part_whole_over_data(case):
    placement, topology = case
    for s, k in every(topology):
        whole, own = placement.inner_index(k), placement.shard_at((s, k)).index
        for dim, (outer, inner) in enumerate(zip(whole, own)):
            assert outer.start <= inner.start < inner.stop <= outer.stop
            if dim != placement.data_dim:
                assert outer == inner
    seen = np.zeros(placement.shape, int)
    for k in range(topology.inner_size):
        seen[placement.inner_index(k)] += 1
    assert (seen >= 1).all()


@given(st.lists(placed(), min_size=1, max_size=5), st.data())
@settings(deadline=None, max_examples=100)
def test_every_part_has_one_owner_that_holds_it(cases, data):
    topology = cases[0][1]
    placements = [p for p, t in cases if t == topology]
    whole = [data.draw(st.booleans()) for _ in placements]
    units = assign_owners(placements, whole, topology)
    assert units == tuple(sorted(units, key=lambda u: (u.variable, u.shard or 0)))
    for v, placement in enumerate(placements):
        mine = [u for u in units if u.variable == v]
        if whole[v] and not placement.is_whole:
            assert [u.shard for u in mine] == [None]
        else:
            assert [u.shard for u in mine] == list(range(len(placement.shards)))
            assert all(u.owner in placement.shards[u.shard].holders for u in mine)
    assert units == assign_owners(placements, whole, topology)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
@settings(deadline=None, max_examples=60)
def test_owners_are_balanced(lengths):
    """Longest first to the least loaded: at most the mean plus the largest piece."""
    topology = TOPOLOGIES[0]
    placements = [make((n,), (None,), topology) for n in lengths]
    load = dict.fromkeys(every(topology), 0)
    for unit in assign_owners(placements, [False] * len(lengths), topology):
        load[unit.owner] += lengths[unit.variable]
    assert max(load.values()) <= sum(lengths) / 4 + max(lengths)
    assert max(load.values()) - min(load.values()) <= max(lengths)


def test_the_whole_table_of_a_cut_over_one_axis():
    topology = TOPOLOGIES[1]
    placement = make((6, 4), (None, "model"), topology)
    assert placement.table == ((0, 1), (0, 1))
    assert [s.index[1] for s in placement.shards] == [slice(0, 2), slice(2, 4)]
    assert placement.shards[1].holders == ((0, 1), (1, 1))
    assert placement.nbytes == 96
    assert not placement.is_whole
    assert placement.data_dim is None


def test_a_cut_over_data_is_gathered_for_compute():
    topology = TOPOLOGIES[1]
    placement = make((6, 4), ("data", "model"), topology)
    assert placement.data_dim == 0
    assert placement.table == ((0, 1), (2, 3))
    assert placement.shard_at((1, 0)).index == (slice(3, 6), slice(0, 2))
    assert placement.inner_index(0) == (slice(0, 6), slice(0, 2))


def test_scalars_are_whole_everywhere():
    placement = place(
        "w", (), 8, resolve_layouts([("w", ())], None, TOPOLOGIES[1])[0][0], TOPOLOGIES[1]
    )
    assert placement.is_whole
    assert placement.nbytes == 8
    assert len(placement.shards[0].holders) == 4


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_coordinates_are_those_of_the_devices(topology):
    """(slice, inner) names the device that the topology puts there."""
    seen = {}
    for s, k in every(topology):
        coordinate = coordinate_of(topology, s, k)
        assert set(coordinate) == set(topology.axis_names)
        seen[tuple(sorted(coordinate.items()))] = topology.slices[s].devices[k]
    assert len(set(seen.values())) == len(seen) == topology.data_size * topology.inner_size


def test_relative_and_covers():
    index = (slice(4, 6), slice(0, 3))
    assert relative(index, (slice(3, 9), slice(0, 3))) == (slice(1, 3), slice(0, 3))
    assert covers(relative(index, index), (2, 3))
    assert not covers(index, (6, 3))
    assert covers((), ())


def test_overlaps() -> None:
    boxes = [
        (slice(a, b), slice(c, d)) for a, b, c, d in [(0, 3, 0, 4), (2, 5, 1, 2), (3, 4, 0, 1)]
    ]
    for x, y in itertools.product(boxes, boxes):
        whole = np.zeros((6, 6), int)
        whole[x] += 1
        whole[y] += 1
        both = overlap(x, y)
        found = np.zeros((6, 6), bool)
        if both is not None:
            found[both] = True
        np.testing.assert_array_equal(found, whole == 2)
