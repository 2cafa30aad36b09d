"""How sums go between processes: the messages, and which algorithm is chosen. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import kdist
from kdist.comm.algorithms import ALGORITHMS, schedule
from kdist.comm.cost import LinkCost
from kdist.config.fusion import FusionConfig
from kdist.plan.bucket import make_buckets
from kdist.plan.routes import Sum, _load, choose, pieces, routed, routes, seconds
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import assign_owners
from kdist.sharding.placement import place

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

LINK = LinkCost(a=1e-3, b=2e-9)
MB = 2**20


def over(processes: int, each: int = 1) -> Topology:
    """A data axis over the devices of several processes."""
    found = Topology.from_mesh(kdist.mesh(data=processes * each))
    slices = tuple(
        dataclasses.replace(one, devices=(f"/job:kdist/task:{n // each}/device:CPU:{n % each}",))
        for n, one in enumerate(found.slices)
    )
    return dataclasses.replace(found, slices=slices)


def ways(topology: Topology, sizes: list[int], fusion: FusionConfig, **more: Any) -> list[str]:
    """The algorithm of each of several parameters that travel alone."""
    placements = [
        place(f"w{n}", (size,), 4, WeightLayout((None,)), topology) for n, size in enumerate(sizes)
    ]
    units = assign_owners(placements, [False] * len(sizes), topology)
    found = routed(units, [], placements, topology, fusion, more.get("direct", ()))
    assert [dataclasses.replace(u, algorithm="direct") for u in found] == list(units)
    return [u.algorithm for u in sorted(found, key=lambda u: u.variable)]


@given(st.integers(0, 50), st.integers(1, 9))
def test_pieces_are_even(elements: int, count: int) -> None:
    found = pieces(elements, count)
    assert sum(found) == elements and len(found) == count
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize("operation", ["reduce", "broadcast"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "torus"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_routes_carry_the_whole_value(operation: str, algorithm: str, size: int) -> None:
    made = routes(operation, algorithm, size, 1, 37, 2)
    assert bool(made) == (algorithm != "direct" and (algorithm != "torus" or 2 * size <= 37))
    assert not made or sum(sum(one.sizes) for one in made) == 37
    assert len(made) == (0 if not made else 2 if algorithm == "torus" else 1)
    # Nothing less than the value has to leave each process but one, or to come to it.
    assert not made or sum(one.sent(8) for one in made) >= 37 * 8 * (size - 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ports_carry_what_messages_say(algorithm: str) -> None:
    """For every root, though it is counted for the first one only."""
    for root in range(8):
        sent = np.zeros([2, 8])
        for operation in ("reduce", "broadcast"):
            made = schedule(operation, algorithm, 8, root)
            for message in made.messages:
                if operation == "broadcast" and message.target == root:
                    continue  # brings it what it has
                share = len(message.chunks) / made.pieces
                sent[0, message.source] += share
                sent[1, message.target] += share
        np.testing.assert_allclose(_load(algorithm, 8, root).ports[:, 1], sent.max(0))


def test_what_cannot_be_cut_goes_directly() -> None:
    assert routes("reduce", "ring", 4, 0, 3) == ()
    assert routes("reduce", "ring", 4, 0, 4)[0].sizes == (1, 1, 1, 1)
    assert routes("reduce", "torus", 2, 0, 3, 2) == ()


def test_two_processes_send_directly() -> None:
    assert choose([[Sum(64 * MB, 0, 2)], [Sum(1, 1, 2)]], LINK) == ["direct"] * 2


def test_one_large_sum_is_passed_on_in_pieces() -> None:
    """Otherwise seven processes would send all of it to one."""
    assert choose([[Sum(64 * MB, 0, 8)]], LINK) == ["halving"]
    assert choose([[Sum(64, 0, 8)]], LINK) == ["tree"]


def test_owners_in_all_processes_get_sums_directly() -> None:
    """Each port then carries each byte once, and that is the least."""
    even = [[Sum(8 * MB, n % 4, 4)] for n in range(8)]
    assert choose(even, LINK) == ["direct"] * 8
    each = [[Sum(8 * MB, n, 4) for n in range(4)]]
    assert choose(each, LINK) == ["direct"]


sums = st.builds(
    lambda size, root, nbytes: Sum(nbytes, root % size, size),
    st.just(4) | st.just(3),
    st.integers(0, 3),
    st.sampled_from([100, 10_000, 1_000_000, 64_000_000]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(sums, min_size=1, max_size=2), min_size=1, max_size=3))
def test_the_choice_is_the_best_of_all(groups: list[list[Sum]]) -> None:
    found = seconds(groups, choose(groups, LINK), LINK)
    powers = {one.size for group in groups for one in group} == {4}
    usable = [a for a in ALGORITHMS if a != "hypercube" or powers]
    every = itertools.product(usable, repeat=len(groups))
    best = min(seconds(groups, each, LINK) for each in every)
    assert found == pytest.approx(best, rel=1e-8)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(sums, min_size=1, max_size=2), min_size=4, max_size=12))
def test_the_choice_is_no_worse_than_one_way_for_all(groups: list[list[Sum]]) -> None:
    found = seconds(groups, choose(groups, LINK), LINK)
    powers = {one.size for group in groups for one in group} == {4}
    usable = [a for a in ALGORITHMS if a != "hypercube" or powers]
    alike = min(seconds(groups, [one] * len(groups), LINK) for one in usable)
    assert found <= alike * (1 + 1e-8)


def test_a_setting_holds_for_all_sums_but_those_that_go_directly() -> None:
    fusion = FusionConfig(algorithm="halving")
    assert ways(over(4), [64, 128, 256], fusion) == ["halving"] * 3
    assert ways(over(4), [64, 128, 256], fusion, direct={1}) == ["halving", "direct", "halving"]


def test_the_choice_follows_the_cost_of_messages() -> None:
    sizes, cheap = [64 * MB], LinkCost(a=0, b=2e-9)
    dear = LinkCost(a=1e3, b=2e-9)
    assert ways(over(8), sizes, FusionConfig(link=cheap)) == ["ring"]
    assert ways(over(8), sizes, FusionConfig(link=dear)) == ["tree"]


def test_one_process_sends_nothing() -> None:
    topology = Topology.from_mesh(kdist.mesh(data=4))
    assert ways(topology, [64, 64], FusionConfig(algorithm="ring")) == ["direct"] * 2


def test_a_bucket_goes_in_one_way() -> None:
    topology = over(4, 2)
    placements = [place("w", (64, 4), 4, WeightLayout((None, None)), topology)] * 3
    units = assign_owners(placements, [False] * 3, topology, [0] * 3)
    buckets = make_buckets(units, placements, [1] * 3, [False] * 3)
    assert len(buckets) == 1 and len(buckets[0].owners) == 8
    for algorithm in ("auto", "ring"):
        found = routed(units, buckets, placements, topology, FusionConfig(algorithm=algorithm), ())
        (bucket,) = make_buckets(found, placements, [1] * 3, [False] * 3)
        assert {unit.algorithm for unit in found} == {bucket.algorithm}
        assert bucket.algorithm == {"auto": "direct"}.get(algorithm, algorithm)


def test_a_hypercube_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match="'halving'.*algorithm='hypercube', and .* 3 processes"):
        ways(over(3), [64], FusionConfig(algorithm="hypercube"))
