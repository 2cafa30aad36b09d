"""What one micro-batch needs at once in a stage whose backward pass is in halves."""

from __future__ import annotations

import dataclasses

from kdist.graphs.chunks import ProgramGraph, node_of
from kdist.stages.stage_peaks import Halves, StageTrace

SIZES = {"a": 10, "b": 20, "y": 1, "di": 2, "h": 5, "t": 40, "dw": 3, "u": 30, "g": 7}


def traced() -> tuple[StageTrace, Halves]:
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
    graph = ProgramGraph(inputs, ["y:0"])

    def kind(name: str) -> str:
        return "Placeholder" if name == "x" else "Mul"

    def nbytes(reference: str) -> int:
        return SIZES.get(node_of(reference), 0)

    trace = StageTrace(graph, {"x", "a", "b", "y"}, {"g"}, kind, nbytes, calls=True)
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


def test_what_the_second_half_repeats_waits_for_what_it_is_handed() -> None:
    """Only what it is handed comes late there: `h -> p -> dw`, each with what runs again."""
    sizes = {"first": 30, "small": 1, "second": 30, "y": 1, "di": 2, "h": 5, "p": 4, "dw": 3}
    inputs: dict[str, tuple[str, ...]] = {
        "x": (),
        "first": ("x:0",),
        "small": ("first:0",),
        "second": ("small:0",),
        "y": ("second:0",),
        "di": ("g:0",),
        "h": ("g:0",),
        "p": ("h:0", "first:0"),
        "dw": ("p:0", "second:0"),
    }
    forward = {"x", "first", "small", "second", "y"}
    trace = StageTrace(
        ProgramGraph(inputs, ["y:0"]),
        forward,
        {"g"},
        lambda name: "Placeholder" if name == "x" else "Mul",
        lambda reference: sizes.get(node_of(reference), 0),
        calls=True,
    )
    given = {"x:0": 0, "small:0": 1, "h:0": 5}
    halves = Halves(["di:0"], ["dw:0"], ["h:0"], ["x:0", "small:0"], given)
    # One of the two that run again is there at a time, the second beside p.
    assert trace.in_halves(["x:0", "small:0"], halves) == 1 + 5 + 4 + 30


def test_of_a_sum_that_lies_elsewhere_there_is_a_part_until_it_is_made() -> None:
    trace, halves = traced()
    saved = ["a:0", "b:0"]
    # When h and di are made, t is on another device, and the part of it is gone.
    assert trace.reading(["t"]).in_halves(saved, halves) == 10 + 20 + 1 + 40
    # What the forward pass has summed elsewhere is never there again.
    given = dataclasses.replace(halves, given={"a:0": 0, "h:0": 5})
    assert trace.reading(["a"]).in_halves(saved, given) == 20 + 1 + 40 + 5 + 2
    assert trace.reading([]).in_halves(saved, halves) == trace.in_halves(saved, halves)
    # Beside a its part is there, in the forward pass, as the sum would be where it lies.
    wide = dataclasses.replace(trace, nbytes=lambda r: 900 if r == "b:0" else trace.nbytes(r))
    assert wide.reading(["b"]).in_halves(saved, halves) == 10 + 900
