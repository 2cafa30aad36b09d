"""A program cut at its communications: no segment waits for itself, and none is in two."""

from __future__ import annotations

from kdist.graphs.segments import segments

import hypothesis
from hypothesis import strategies as st


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, list[str]], set[str], set[str]]:
    """Nodes with what they read, those that stay apart, and constants."""
    count = draw(st.integers(1, 30))
    sources: dict[str, list[str]] = {}
    constants = set()
    for i in range(count):
        before = draw(st.lists(st.sampled_from([*sources] or ["input"]), max_size=3))
        if not before and draw(st.booleans()):
            constants.add(str(i))
        sources[str(i)] = before
    apart = draw(st.sets(st.sampled_from([*sources]), max_size=count)) - constants
    return sources, apart, constants


@hypothesis.given(programs())
def test_nodes_run_in_one_segment_and_none_waits_for_itself(
    program: tuple[dict[str, list[str]], set[str], set[str]],
) -> None:
    sources, apart, constants = program
    found = segments(sources, apart.__contains__, constants, least=1)
    every = [name for one in found for name in one]
    assert sorted(every) == sorted(sources.keys() - apart - constants)
    assert all(list(one) == [n for n in sources if n in one] for one in found)
    # As one node each, they can run one after the other.
    of = {name: number for number, one in enumerate(found) for name in one}
    waits: dict[object, set[object]] = {}
    for name, before in sources.items():
        mine = waits.setdefault(of.get(name, name), set())
        mine |= {of.get(s, s) for s in before if s in sources} - {of.get(name, name)}
    done: set[object] = set()
    while ready := {n for n, before in waits.items() if n not in done and before <= done}:
        done |= ready
    assert done == waits.keys()


def test_a_collective_is_between_two_segments() -> None:
    sources = {"a": ["x"], "b": ["a"], "sum": ["b"], "c": ["sum"], "d": ["c", "a"]}
    assert segments(sources, "sum".__eq__, least=1) == [("a", "b"), ("c", "d")]


def test_what_needs_no_communication_runs_with_its_first_reader() -> None:
    """A cast weight would be there from the beginning on."""
    sources = {"cast": ["w"], "a": ["x"], "sum": ["a"], "c": ["sum", "cast"]}
    assert segments(sources, "sum".__eq__, least=1) == [("cast", "c"), ("a",)]


def test_constants_hold_nothing_together() -> None:
    sources: dict[str, list[str]] = {"zero": [], "a": ["x", "zero"], "b": ["y", "zero"]}
    assert segments(sources, bool, {"zero"}, least=1) == []
    assert segments(sources, "".__eq__, {"zero"}, least=1) == [("a",), ("b",)]


def test_few_nodes_are_no_segment() -> None:
    sources = {"a": ["x"], "b": ["a"], "c": ["y"]}
    assert segments(sources, "".__eq__, least=2) == [("a", "b")]
