"""What layers communicate over inner axes, added up from programs of several sizes."""

from __future__ import annotations

import dataclasses

from kdist.plan.inside_layers import InsideTraffic, inside_traffic

import pytest
from hypothesis import given
from hypothesis import strategies as st

AXES = {"data": 2, "model": 2, "expert": 3}


@dataclasses.dataclass(frozen=True)
class One:
    """A collective."""

    kind: str
    axis: tuple[str, ...]
    bytes: int
    phase: str = "forward"


def summed(nbytes: int) -> One:
    return One("all-reduce", ("model",), nbytes)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 8), st.integers(1, 8))
def test_bytes_for_any_size_follow_from_two(fixed: int, each: int, rows: int, more: int) -> None:
    programs = {n: [summed(fixed + each * n)] for n in (rows + more, rows)}
    (one,) = inside_traffic(programs, 4, 2, AXES.__getitem__)
    assert one.by_rows == (4 * fixed, each)
    assert one.nbytes(4 * 13) == 4 * (fixed + 13 * each)
    assert one.nbytes(14) == 4 * fixed + 14 * each  # parts that differ by a row


def test_of_one_size_nothing_else_is_known() -> None:
    (one,) = inside_traffic({2: [summed(8), summed(4)]}, 4, 2, AXES.__getitem__)
    assert (one.collectives, one.by_rows, one.nbytes(8), one.nbytes(16)) == (8, None, 48, None)
    assert str(one) == "48 B for 8 rows"


def test_groups_of_one_axis_count_each() -> None:
    found = [
        summed(8),
        One("all-gather", ("model", "expert"), 8),
        One("all-gather", ("expert",), 8),
    ]
    counts = [one.collectives for one in inside_traffic({1: found}, 2, 6, AXES.__getitem__)]
    assert counts == [6, 2, 4]


def test_phases_and_kinds_are_apart() -> None:
    found = [summed(1), dataclasses.replace(summed(2), phase="backward"), summed(3)]
    traffic = inside_traffic({1: found}, 1, 2, AXES.__getitem__)
    assert [(one.phase, one.collectives, one.nbytes(1)) for one in traffic] == [
        ("forward", 2, 4),
        ("backward", 1, 2),
    ]


def test_programs_of_another_make_give_no_law() -> None:
    (one,) = inside_traffic({1: [summed(8)], 2: [summed(8), summed(8)]}, 1, 2, AXES.__getitem__)
    assert (one.sizes, one.by_rows) == (((2, 16),), None)
    (one,) = inside_traffic({1: [summed(8)], 3: [summed(11)]}, 1, 2, AXES.__getitem__)
    assert one.by_rows is None
    assert [one.nbytes(n) for n in (1, 2, 3)] == [8, None, 11]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (((8, 64), (16, 128)), "8 a row"),
        (((8, 100), (16, 100)), "100 B"),
        (((8, 164), (16, 228)), "100 B + 8 a row"),
        (((8, 0), (16, 0)), "0 B"),
    ],
)
def test_text(sizes: tuple[tuple[int, int], ...], text: str) -> None:
    assert str(InsideTraffic("all-reduce", ("model",), "forward", 2, sizes)) == text
