"""The cost of collectives in one process: what they do is counted, constants are fitted."""

from __future__ import annotations

import dataclasses

import kdist
from kdist import comm
from kdist.comm import collectives, host, ordered
from kdist.comm.algorithms import ALGORITHMS, OPERATIONS
from kdist.comm.calibration import _programs, fit_host
from kdist.comm.host import HostCost, HostWork, count, work
from kdist.comm.measure import DeviceProgram
from kdist.graphs import executed

import numpy as np
import pytest

LINK = HostCost(a=3e-6, b=6e-11, call=2e-4, operation=2e-6, cached=1e-11, cache=1 << 23, devices=8)


def test_work_of_an_all_reduce_by_hand():
    """Direct: seven values to the root, one addition of eight, seven results back."""
    done = work("all_reduce", "direct", 8)
    assert (done.transfers, done.operations) == (14, 1)
    assert done.moved == pytest.approx(8 + 1)  # values read, and their sum written
    assert done.footprint == pytest.approx(8 + 1)


def test_work_of_a_ring_by_hand():
    """Seven rounds of additions of a piece, seven without, eight splits, and what joins pieces."""
    done = work("all_reduce", "ring", 8)
    assert done.transfers == 2 * 7 * 8
    added = 7 * 8 * 3 / 8
    joined = 8 * 2
    assert done.moved == pytest.approx(added + joined)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_counted_is_what_is_measured(operation):
    """Per byte, for any size: the graph that `measure` runs does what the model counts."""
    group = comm.Group.of(kdist.mesh(data=4), "data")
    function = getattr(ordered if operation == "scan" else collectives, operation)
    for algorithm in ALGORITHMS:
        length = 4 * 4 * 100
        own = length // 4 if operation in ("gather", "all_gather") else length
        program = DeviceProgram(
            {device: [np.ones(own, np.float32)] for device in group.devices},
            lambda values, how=algorithm: function([v for (v,) in values], group, algorithm=how),
        )
        expected, found = work(operation, algorithm, 4).times(4 * length), count(program.graph)
        assert (found.transfers, found.operations) == (expected.transfers, expected.operations)
        assert found.moved == pytest.approx(expected.moved)
        assert found.footprint == pytest.approx(expected.footprint)


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [("all_gather", "tree"), ("all_reduce", "ring"), ("all_to_all", "halving")],
)
def test_what_is_counted_is_what_is_executed(operation, algorithm):
    """Joins that several messages of one device have in common are one operation."""
    group = comm.Group.of(kdist.mesh(data=8), "data")
    own = 100 if operation == "all_gather" else 800
    function = getattr(collectives, operation)
    program = DeviceProgram(
        {device: [np.ones(own, np.float32)] for device in group.devices},
        lambda values: function([v for (v,) in values], group, algorithm=algorithm),
    )
    ran = executed.largest(executed.watch(program))
    counts = ran.count("ConcatV2|Split|SplitV|AddN")
    assert sum(counts.values()) == work(operation, algorithm, 8).operations


def test_programs_that_calibrate_do_what_they_are_for():
    devices = kdist.comm.Group.of(kdist.mesh(data=4), "data").devices
    done = [count(program.graph) for program in _programs(devices, (1 << 12,))]
    assert [one.transfers for one in done] == [0, 8, 28, 0, 0, 0, 0]
    assert [one.operations for one in done] == [0, 0, 0, 16, 64, 4, 4]
    assert [one.moved / 4 for one in done[-2:]] == [2 << 12, 3 << 12]


def some_work() -> list[HostWork]:
    found = [HostWork(0, 0, 0, 1e4), HostWork(56, 0, 0, 1e4), HostWork(0, 128, 1e5, 1e5)]
    for size in (1e5, 1e6, 1e7, 1e8, 1e9):
        found += [HostWork(0, 8, 2 * size, 2 * size), HostWork(0, 8, 3 * size, 3 * size)]
    return found


def test_the_fit_finds_the_constants():
    found = fit_host([(done, LINK.of(done)) for done in some_work()], devices=8)
    assert found.error == pytest.approx(0, abs=1e-6)
    for name in ("a", "b", "call", "operation", "cached", "cache"):
        assert getattr(found, name) == pytest.approx(getattr(LINK, name), rel=1e-3), name


def test_a_disturbed_measurement_moves_little():
    timed = [(done, LINK.of(done)) for done in some_work()]
    timed[4] = (timed[4][0], 5 * timed[4][1])
    found = fit_host(timed, devices=8)
    for done in some_work():
        assert found.of(done) == pytest.approx(LINK.of(done), rel=0.1)


def test_no_constant_is_negative():
    faster = [(HostWork(n, n, n * 1e6, n * 1e6), 1.0 / n) for n in (1, 10, 100)]
    found = fit_host(faster, devices=8)
    assert min(found.a, found.b, found.call, found.operation, found.cached) >= 0


def test_a_prediction_is_the_sum_of_its_parts():
    done = work("all_gather", "tree", 4).times(1e5)
    by_hand = LINK.call + LINK.a * done.transfers + LINK.operation * done.operations
    assert done.footprint < LINK.cache
    by_hand += LINK.cached * done.moved
    assert comm.predict("all_gather", "tree", 1e5, 4, LINK) == pytest.approx(by_hand)
    assert comm.predict("all_gather", "tree", 1e6, 1, LINK) == 0


def test_a_byte_costs_more_beyond_the_caches():
    slow = dataclasses.replace(LINK, cache=1.0)
    assert slow.of(host.HostWork(0, 0, 1e6, 1e6)) == pytest.approx(
        LINK.call + 1e6 * LINK.b, rel=1e-3
    )


@pytest.mark.parametrize("name", ["call", "operation", "cached", "cache"])
def test_constants_are_checked(name):
    with pytest.raises(ValueError, match=f"`{name}` of.*Received: {name}=-1"):
        HostCost(**{"a": 1.0, "b": 1.0, name: -1.0})
