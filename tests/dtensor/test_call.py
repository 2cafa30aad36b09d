"""Functions that are lowered: what is kept of them."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.call import MAX_SHAPES, Lowered


def test_what_was_made_of_the_oldest_traces_goes_with_them() -> None:
    function = Lowered.__new__(Lowered)
    shapes = [(f"shape {n}", "one tensor", None) for n in range(2 * MAX_SHAPES + 2)]
    programs = [(*shape, layout) for shape in shapes for layout in ("cut", "whole")]
    held: Any = "held"
    function.traces = dict.fromkeys(shapes, held)
    function.stitchers = dict.fromkeys(programs, held)
    function._calls = {(one, s): held for one in programs for s in (0, 1)}
    function._forget_oldest()
    assert [*function.traces] == shapes[2:]
    assert [*function.stitchers] == programs[4:]
    assert [*function._calls] == [(one, s) for one in programs[4:] for s in (0, 1)]
    function._forget_oldest()
    assert len(function.traces) == 2 * MAX_SHAPES
