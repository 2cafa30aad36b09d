"""Collectives across processes, each process started here, over loopback."""

from __future__ import annotations

import re

import pytest

from .cluster import run


def test_two_processes():
    """One start for several scenarios; the long tests have each in full."""
    refused = run("several", 2)
    rules = ["other side must know the shape", "TensorSpec", "joins others once", "does not know"]
    for texts in refused:
        assert len(texts) == 5
        for text, rule in zip(texts, [*rules, "gradient of broadcast across processes"]):
            assert rule in text
            assert "Received: " in text


def test_gradients_equal_one_device():
    """Of operations that do not give, or take, a value in every process; once, and twice."""
    assert run("gradients", 2) == [4, 4]


def test_gradients_of_groups_of_unequal_lengths_equal_one_device():
    """A group of the mesh may have longer values than another; so may what goes back."""
    assert run("gradients_of_unequal_groups", 2) == [10, 10]


def test_sends_and_receives_of_their_own():
    """The third process takes no part in them, and goes on."""
    assert run("apart", 3) == [3] * 3


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_every_collective_equal_one_device(count):
    assert run("all_gradients", count) == [72] * count


@pytest.mark.long
def test_gradients_of_several_devices_in_each_process():
    assert run("gradients_of_several_devices", 2) == [72] * 2


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_every_collective_equals_numpy(count):
    assert run("every_collective", count) == [9 * (6 if count == 2 else 5)] * count


@pytest.mark.long
def test_several_devices_in_each_process():
    assert run("several_devices", 2) == [54] * 2


@pytest.mark.long
def test_every_dtype_and_reduction():
    assert run("dtypes_and_reductions", 2) == [94] * 2


@pytest.mark.long
def test_uneven_sizes():
    assert run("uneven", 3) == [3] * 3


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        pytest.param("missing", 2, marks=pytest.mark.long),
        ("killed", 3),
        pytest.param("raises", 2, marks=pytest.mark.long),
    ],
)
def test_a_peer_that_is_gone_is_named_in_time(scenario, count):
    found = run(scenario, count, may_die=(count - 1,))
    for failure in found[:-1]:
        assert re.match(
            r"all_reduce over axis 'data' failed, waiting for /job:worker/task:\d", failure["text"]
        )
        assert failure["peers"] == [count - 1]
        assert (failure["axis"], failure["operation"]) == ("data", "all_reduce")
        assert "no answer at its address" in failure["text"]
        # Its own timeout is 4 s.
        assert failure["seconds"] < 12


def test_nobody_leaves_before_the_others():
    """The last of three is late: the first waits to hear from it, the second for the answer."""
    *others, last = run("late", 3)
    assert all(one["free"] > last["began"] for one in others)


@pytest.mark.long
def test_the_first_is_waited_for():
    first, *others = run("late_first", 3)
    assert all(one["free"] > first["began"] for one in others)


@pytest.mark.long
def test_a_process_that_gives_up_says_so():
    """Their limit is 1 s, the last one is 3 s late."""
    first, second, _ = run("gives_up", 3)
    assert len(first) == 1 and "Process 0 leaves before" in first[0]
    # The second may see the first one's time run out, or that it has gone.
    assert second == [] or "Process 1 leaves before" in second[0]


@pytest.mark.long
def test_uneven_values_take_one_algorithm():
    assert run("auto_of_uneven", 2) == [2 * 600_020] * 2


@pytest.mark.long
def test_a_program_waits_at_its_end():
    first, last = run("at_exit", 2)
    assert first["free"] > last["began"]
