"""Gradients that are there once for all slices join those of the slices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kdist.optimizer.slice_gradients import SliceGradients, by_position


def test_gradients_join_in_any_order() -> None:
    """Of a penalty of a table and of a loss over the whole batch, whichever comes first."""
    entries: list[Any] = [SimpleNamespace(placement=None)] * 2
    gradients = {0: {0: [1.0]}}
    source = SliceGradients(gradients, {}, entries, [["CPU:0"]])
    one, other = {0: 2.0}, {0: 3.0, 1: 4.0}
    for first, second in ((one, other), (other, one)):
        joined = source.joined(first).joined(second)
        assert joined.once == {0: 5.0, 1: 4.0}
        assert joined.gradients is gradients, "filled in while others are computed"
    assert not source.once and one == {0: 2.0}


def test_by_position() -> None:
    assert by_position({0: 1.0, 1: 2.0}, {1: 3.0, 2: 4.0}) == {0: 1.0, 1: 5.0, 2: 4.0}
