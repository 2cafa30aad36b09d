"""Constant ids of a trace on one row are told apart by a trace on many."""

from __future__ import annotations

from kdist.storage.constant_ids import ConstantIds, for_each_row, knowing

import numpy as np

ROWS = 7


def _noted(*ids: np.ndarray) -> ConstantIds:
    found = ConstantIds()
    for one in ids:
        found = found.with_look_up(one, ROWS)
    return found


def test_once_or_for_each_row() -> None:
    positions = np.arange(4)[None]
    found = _noted(positions, np.full((ROWS, 1), 3), np.full((ROWS,), 5))
    assert found.for_each_row(np.array([[3]])) is True
    assert found.for_each_row(np.array([5])) is True
    assert found.for_each_row(positions) is False
    # The same values in another shape are another look-up.
    assert found.for_each_row(np.array([3])) is None
    assert found.for_each_row(np.array([[5]])) is None


def test_what_is_looked_up_both_ways_cannot_be_told() -> None:
    found = _noted(np.array([[3]]), np.full((ROWS, 1), 3))
    assert found.for_each_row(np.array([[3]])) is None


def test_other_look_ups_are_not_noted() -> None:
    by_row = np.arange(ROWS)[:, None]
    nothing = np.zeros((0, 2), int)
    assert _noted(np.array(3), by_row, np.array([1, 2]), nothing) == ConstantIds()


def test_what_is_known_is_of_the_model_that_is_traced() -> None:
    ids = np.array([[3]])
    assert for_each_row(ids) is None
    with knowing(_noted(np.full((ROWS, 1), 3))):
        assert for_each_row(ids) is True
        with knowing(_noted(ids)):
            assert for_each_row(ids) is False
        assert for_each_row(ids) is True
    assert for_each_row(ids) is None
