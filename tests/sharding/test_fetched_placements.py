"""Placements of tables on the host, and of tables split by hand."""

from __future__ import annotations

import kdist
from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.owners import assign_owners
from kdist.sharding.placement import TableSplit, place_on_host, place_split

import pytest

SHAPE, ITEM = (64, 2), 4


def topology(available: int = 8, **axes: int) -> Topology:
    names = [f"/device:CPU:{i}" for i in range(available)]
    return Topology.from_mesh(kdist.mesh(**axes), names)


def test_the_host_is_the_first_cpu_outside_the_mesh() -> None:
    assert topology(data=4).host == "/device:CPU:4"
    assert topology(data=4).host_is_apart
    full = topology(available=4, data=4)
    assert (full.host, full.host_is_apart) == ("/device:CPU:0", False)
    assert full.device(HOST) == "/device:CPU:0"
    assert topology(data=2, model=2).device((1, 0)) == "/device:CPU:2"


def test_the_host_has_all_of_a_table_and_updates_it() -> None:
    mesh = topology(data=2, model=2)
    placement = place_on_host("table", SHAPE, ITEM, mesh)
    assert placement.on_host and placement.fetched and placement.is_whole
    assert not placement.gathered
    assert placement.stored_bytes(HOST) == 64 * 2 * ITEM
    assert {placement.stored_bytes((s, k)) for s in range(2) for k in range(2)} == {0}
    (unit,) = assign_owners([placement], [True], mesh)
    assert (unit.owner, unit.shard) == (HOST, 0)


@pytest.mark.parametrize("axis", ["data", "model"])
def test_parts_are_as_long_as_they_are_told(axis: str) -> None:
    mesh = topology(data=2, model=2)
    placement = place_split("table", SHAPE, ITEM, (50, 14), TableSplit(axis, axis == "data"), mesh)
    assert placement.fetched and not placement.on_host and not placement.gathered
    assert [shard.index[0] for shard in placement.shards] == [slice(0, 50), slice(50, 64)]
    for s in range(2):
        for k in range(2):
            part = s if axis == "data" else k
            assert placement.stored_bytes((s, k)) == (50, 14)[part] * 2 * ITEM
            assert (s, k) in placement.shards[part].holders
    owners = [unit.owner for unit in assign_owners([placement], [False], mesh)]
    assert [at in shard.holders for at, shard in zip(owners, placement.shards)] == [True, True]
