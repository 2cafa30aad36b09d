"""What one micro-batch needs at once in a stage whose backward pass is in halves."""

from __future__ import annotations

import dataclasses

from kdist.graphs.chunks import Graph, node_of
from kdist.stages.stage_peaks import Halves, Trace

SIZES = {"a": 10, "b": 20, "y": 1, "di": 2, "h": 5, "t": 40, "dw": 3, "u": 30, "g": 7}


def traced() -> tuple[Trace, Halves]:
    """`x -> a -> b -> y`; the first half goes by b to di, the second from h, by a, to dw."""
    inputs: dict[str, tuple[str, ...]] = {
        "x": (),
        "a": ("x:0",),
        "b": ("a:0",),
        "y": ("b:0",),
        "t": ("b:0", "g:0"),
        "h": ("g:0", "t:0"),
        "di": ("t:0",),
        "u": ("h:0", "a:0"),
        "dw": ("u:0",),
    }
    graph = Graph(inputs, ["y:0"])

    def kind(name: str) -> str:
        return "Placeholder" if name == "x" else "Mul"

    def nbytes(reference: str) -> int:
        return SIZES.get(node_of(reference), 0)

    trace = Trace(graph, {"x", "a", "b", "y"}, {"g"}, kind, nbytes, calls=True)
    return trace, Halves(["di:0"], ["dw:0"], ["h:0"], ["a:0"], {"a:0": 10, "h:0": 5})


def test_halves_need_less_at_once_than_one_function() -> None:
    trace, halves = traced()
    # The first half: a and b are held until it ends, t and what it returns are made, y is returned.
    assert trace.in_halves(["a:0", "b:0"], halves) == 10 + 20 + 1 + 40 + 5 + 2
    # In one function u, of the second half, is there too, when h is gone.
    assert trace.in_one(["a:0", "b:0"], ["di:0"], ["dw:0"]) == 10 + 20 + 1 + 40 + 2 + 30


def test_each_half_repeats_what_it_needs() -> None:
    trace, halves = traced()
    kept = dataclasses.replace(halves, lasting=["x:0"], given={"x:0": 0, "h:0": 5})
    # Nothing is held: t takes the place of b' in the first half, u that of a' in the second.
    assert trace.in_halves(["x:0"], kept) == 1 + 40 + 5 + 2
    assert trace.in_one(["x:0"], ["di:0"], ["dw:0"]) == 1 + 40 + 2 + 30


def test_views_that_are_handed_take_nothing() -> None:
    trace, halves = traced()
    wide = dataclasses.replace(halves, given={"a:0": 10, "h:0": 500})
    saved = ["a:0", "b:0"]
    view = dataclasses.replace(halves, given={"a:0": 10, "h:0": 0})
    assert trace.in_halves(saved, wide) > 500
    assert trace.in_halves(saved, view) == trace.in_halves(saved, halves)
