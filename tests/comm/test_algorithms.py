"""Every schedule, carried out on sets, gives what its operation means."""

from __future__ import annotations

from kdist.comm import torus
from kdist.comm.algorithms import ALGORITHMS, OPERATIONS, ROOTED, schedule
from kdist.comm.messages import Message, Schedule

import pytest

from .simulate import expected, run

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_device_ends_with_what_the_operation_means(operation, algorithm):
    for size in SIZES:
        if algorithm == "hypercube" and size & (size - 1):
            continue
        for root in range(size if operation in ROOTED else 1):
            for exclusive in (False, True) if operation == "scan" else (False,):
                found = schedule(operation, algorithm, size, root)
                state = run(found, exclusive)
                for rank in range(size):
                    for chunk, terms in expected(found, rank, exclusive).items():
                        assert state[rank][chunk] == terms, (str(found), rank, chunk)


SIDES = [(1, 3), (4, 1), (2, 2), (2, 3), (3, 2), (4, 2), (3, 4), (5, 3)]


@pytest.mark.parametrize(("a", "b"), SIDES)
def test_a_torus_reduces_along_both_dims(a, b):
    found = schedule("all_reduce", f"torus:{a}x{b}", a * b)
    state = run(found)
    for rank in range(a * b):
        assert state[rank] == expected(found, rank)
    for message in found.messages:  # to the next in its row, or in its column
        (i, j), (k, m) = divmod(message.source, a), divmod(message.target, a)
        assert (i == k and (m - j) % a in (1, a - 1)) or (j == m and (k - i) % b in (1, b - 1))
    across = sum(len(m.chunks) for m in found.messages if m.source // a != m.target // a)
    # Rows send each other 2(b - 1)/b of an a-th of the value per device; there are b pieces of it.
    assert across == 2 * (b - 1) * a * b


def test_sides_of_a_torus():
    assert torus.sides("torus", 12) == (4, 3)
    assert torus.sides("torus", 7) == (7, 1)
    assert torus.of_processes(["p", "p", "q", "q", "r", "r"]) == "torus:2x3"
    for processes in (["p", "p", "q"], ["p", "q", "p", "q"], ["p", "q", "q", "p"]):
        with pytest.raises(ValueError, match=r"rows of a torus are processes.*Received: ranks"):
            torus.of_processes(processes)
    for name in ("torus:2x2", "torus:6", "torus:0x6", "torus:"):
        with pytest.raises(ValueError, match=r"B rows of A.*Received: algorithm='torus:.*size=6"):
            schedule("all_reduce", name, 6)
    with pytest.raises(ValueError, match=r"Received: algorithm='torus' for broadcast"):
        schedule("broadcast", "torus", 4)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_hypercube_of_another_size_is_refused(operation):
    with pytest.raises(ValueError, match=r"power of two.*halving.*Received: .*size=6"):
        schedule(operation, "hypercube", 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sum", "ring", 2), "operation is one of .*Received: operation='sum'"),
        (("reduce", "star", 2), "algorithm is one of .*Received: algorithm='star'"),
        (("reduce", "ring", 0), "at least 1.*Received: size=0"),
        (("reduce", "ring", 2, 2), "from 0 to 1.*Received: root=2"),
        (("scan", "ring", 2, 1), "has none.*Received: root=1"),
        (("broadcast", "tree", 4, 0.5), "from 0 to 3.*Received: root=0.5"),
        (("broadcast", "tree", 4, True), "from 0 to 3.*Received: root=True"),
    ],
)
def test_what_has_no_schedule_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ((Message(0, 1, (0,)), Message(0, 2, (0,))), "source of at most one"),
        ((Message(0, 1, (0,)), Message(2, 1, (0,))), "target of at most one"),
        ((Message(0, 3, (0,)),), "from 0 to 2"),
        ((Message(0, 1, ()),), "at least one chunk"),
        ((Message(0, 1, (0, 1), into=(2,)),), "one alone `into`"),
        ((Message(1, 1, (0,)),), "without a message"),
    ],
)
def test_a_schedule_is_single_port(messages, rule):
    with pytest.raises(ValueError, match=rule):
        Schedule(operation="x", algorithm="y", size=3, rounds=(messages,))


def test_the_worked_example():
    """In p - 1 reduce rounds, then p - 1 rounds that spread the sums, over p pieces."""
    rounds = schedule("all_reduce", "ring", 3).rounds
    assert [[m.combine for m in messages] for messages in rounds] == [
        [True] * 3,
        [True] * 3,
        [False] * 3,
        [False] * 3,
    ]
    assert all(len(m.chunks) == 1 for messages in rounds for m in messages)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_ring_only_talks_to_neighbours(size):
    for operation in OPERATIONS:
        for message in schedule(operation, "ring", size).messages:
            assert (message.source - message.target) % size in (1, size - 1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_hypercube_only_talks_along_its_edges(size):
    for operation in OPERATIONS:
        for message in schedule(operation, "hypercube", size).messages:
            assert (message.source ^ message.target).bit_count() == 1


def test_a_schedule_prints_its_messages():
    assert str(schedule("broadcast", "tree", 4)).splitlines() == [
        "broadcast by tree, 4 devices, 3 messages in 2 rounds",
        "0: 0->2 =[0]",
        "1: 0->1 =[0]  2->3 =[0]",
    ]
