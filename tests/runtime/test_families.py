"""Which shapes of a batch may share a program, and which sizes it is tried at."""

from __future__ import annotations

import itertools

from kdist.dtensor.formulas import Formula, find
from kdist.dtensor.sizes import Multiples
from kdist.runtime.families import changing_dims, families

import numpy as np
import pytest

FOURS = Multiples(4, 4)


def shapes(rows: int, length: int, width: int = 3) -> tuple[tuple[int, ...], ...]:
    return ((rows, length, width), (rows, length))


def test_dims_that_change_together() -> None:
    changing = changing_dims([shapes(8, 12), shapes(8, 9), shapes(5, 12)])
    assert [one.places for one in changing] == [((0, 0), (1, 0)), ((0, 1), (1, 1))]
    assert [one.is_rows for one in changing] == [True, False]
    # Rows are the batch, even if there are always as many as something else.
    changing = changing_dims([shapes(4, 4), shapes(8, 8)])
    assert [one.places for one in changing] == [((0, 0), (1, 0)), ((0, 1), (1, 1))]


@pytest.mark.parametrize("multiple", [1, 4])
def test_examples_of_all_families_are_independent(multiple: int) -> None:
    seen = [shapes(8 * multiple, 12 * multiple), shapes(multiple, 20 * multiple)]
    seen.append(shapes(8 * multiple, 2 * multiple, 9 * multiple))
    found = list(families(seen, Multiples(multiple, multiple)))
    assert len(found) >= 3
    for family in found:
        assert family.has(seen[-1])
        assert family.general == ((None, None, None), (None, None))
        assert len(family.tried(0)) == 6
        for one, other in itertools.combinations(family.examples, 2):
            assert all(size % multiple == 0 and size >= 2 * multiple for size in (*one, *other))
            assert np.linalg.matrix_rank([one, other, [1] * len(one)]) == 3


def test_what_a_family_serves() -> None:
    family = next(families([shapes(8, 12), shapes(8, 9), shapes(8, 20)]))
    assert family.has(shapes(8, 1)) and family.has(shapes(8, 10_000))
    assert not family.has(shapes(7, 9))
    assert not family.has(((8, 12, 3), (8, 11)))
    family = next(families([shapes(8, 12), shapes(4, 8), shapes(16, 20)], FOURS, parts=1))
    assert family.has(shapes(4, 16)) and not family.has(shapes(6, 16))
    in_parts = next(families([shapes(8, 12), shapes(8, 8), shapes(16, 20)], FOURS, 2))
    assert in_parts.has(shapes(24, 4)) and not in_parts.has(shapes(12, 4))


def test_rows_that_an_axis_cuts() -> None:
    family = next(families([shapes(8, 12), shapes(8, 9), shapes(6, 20)], Multiples(2, 1)))
    assert family.has(shapes(4, 15)) and not family.has(shapes(5, 15))


def test_sizes_that_do_not_divide_have_no_family() -> None:
    assert list(families([shapes(8, 12), shapes(8, 8), shapes(8, 9)], FOURS)) == []


def test_sizes_as_far_apart_as_those_seen() -> None:
    *_, last = families([shapes(8, 12), shapes(8, 28), shapes(8, 20)])
    assert last.has(shapes(8, 36)) and not last.has(shapes(8, 37))
    assert all(size % 8 == 4 for size in last.examples[0])


LENGTHS, ROWS = (12, 17, 9, 30), (4, 5, 7, 3)


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        (LENGTHS, Formula((LENGTHS,))),
        ([64 * n for n in LENGTHS], Formula((LENGTHS,), 64)),
        ([3 * n - 2 for n in LENGTHS], Formula((LENGTHS,), 3, 1, -2)),
        ([m * n for m, n in zip(LENGTHS, ROWS)], Formula((LENGTHS, ROWS))),
        ([n * n for n in LENGTHS], Formula((LENGTHS, LENGTHS))),
        ([m * m * n * 5 for m, n in zip(LENGTHS, ROWS)], Formula((LENGTHS, LENGTHS, ROWS), 5)),
        ([-(-n // 2) for n in LENGTHS], None),
        ([0, 0, 0, 1], None),
    ],
)
def test_formulas(numbers: tuple[int, ...], wanted: Formula | None) -> None:
    assert find(tuple(numbers), [LENGTHS, ROWS]) == wanted


def test_a_part_of_a_size() -> None:
    assert find((6, 4, 5), [(12, 8, 10)]) == Formula(((12, 8, 10),), 1, 2)
