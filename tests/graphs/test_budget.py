"""The cheapest nodes to run again, if what is kept may take so many bytes."""

from __future__ import annotations

import itertools
import random

from kdist.graphs.budget import Trade, apart, best_trades, joined, largest_that_fits, together
from kdist.graphs.chunks import ProgramGraph, node_of

import pytest


def random_program(rng: random.Random) -> tuple[ProgramGraph, dict, dict, set[str], set[str]]:
    """Up to 14 operations with skip connections; the backward pass reads some."""
    names = [f"n{i}" for i in range(rng.randint(3, 14))]
    inputs: dict[str, list[str]] = {}
    for i, name in enumerate(names):
        near = [f"{names[i - 1]}:0:0"] if i else ["x"]
        skips = rng.sample(names[:i], min(i, rng.choice([0, 0, 1, 2])))
        inputs[name] = [*near, *(f"{n}:0:0" for n in skips)]
    nbytes = {n: rng.randint(1, 40) for n in names}
    seconds = {n: rng.choice([0.1, 1.0, 1.0, 5.0, rng.uniform(0, 20)]) for n in names}
    repeatable = {n for n in names if rng.random() < 0.85}
    read = {n for n in names if rng.random() < 0.6} | {names[-1]}
    return ProgramGraph(inputs, []), nbytes, seconds, repeatable, read


def wanted(graph: ProgramGraph, again: set[str], read: set[str]) -> set[str]:
    """What has to be there in the backward pass."""
    found: set[str] = set()
    waiting = list(read)
    while waiting:
        name = waiting.pop()
        if name in graph.inputs and name not in found:
            found.add(name)
            waiting.extend(map(node_of, graph.inputs[name]) if name in again else ())
    return found


def brute_force(
    graph: ProgramGraph, nbytes: dict, seconds: dict, repeatable: set[str], read: set[str]
) -> list[tuple[int, float]]:
    """Bytes and seconds of every choice."""
    found = set()
    order = sorted(repeatable)
    for bits in itertools.product((False, True), repeat=len(order)):
        again = set(itertools.compress(order, bits))
        there = wanted(graph, again, read)
        if again <= there:
            kept = sum(nbytes[n] for n in there - again)
            found.add((kept, sum(seconds[n] for n in sorted(again))))
    return sorted(found)


@pytest.mark.parametrize("seed", range(10))
def test_as_cheap_as_brute_force(seed: int) -> None:
    """30 programs each, at ten budgets, the least one included."""
    rng = random.Random(seed)
    for _ in range(30):
        graph, nbytes, seconds, repeatable, read = program = random_program(rng)
        every, trades = brute_force(*program), best_trades(*program)
        for one in trades:
            there = wanted(graph, set(one.again), read)
            assert one.again <= there
            assert one.nbytes == sum(nbytes[n] for n in there - one.again)
            assert one.seconds == pytest.approx(sum(seconds[n] for n in one.again))
        least, most = every[0][0], max(b for b, s in every if s == 0)
        assert trades[0].nbytes == least
        for tenth in range(11):
            budget = least + tenth * (most - least) / 10
            best = min(s for b, s in every if b <= budget)
            mine = min(t.seconds for t in trades if t.nbytes <= budget)
            assert mine <= 1.05 * best + 1e-9, (seed, tenth)


def chain(blocks: int) -> tuple[ProgramGraph, dict, dict, set[str], set[str]]:
    """Blocks whose end is kept, with two large results inside."""
    inputs, x = {}, "x"
    for i in range(blocks):
        for part in "abcd":
            inputs[f"{part}{i}"] = [x]
            x = f"{part}{i}:0:0"
    nbytes = {n: 10 if n[0] in "bc" else 1 for n in inputs}
    repeatable = {n for n in inputs if n[0] != "d"}
    return ProgramGraph(inputs, []), nbytes, dict.fromkeys(inputs, 1.0), repeatable, {*inputs}


def test_blocks_are_decided_one_by_one() -> None:
    trades = best_trades(*chain(20))
    steps = [b.nbytes - a.nbytes for a, b in zip(trades, trades[1:])]
    assert max(steps) <= 21 * 2
    assert not trades[-1].again
    assert trades[0].nbytes == 20 + 1 - 1  # the ends alone


def test_views_take_nothing() -> None:
    graph = ProgramGraph({"a": ["x"], "v": ["a:0:0"]}, [])
    trades = best_trades(graph, {"a": 8, "v": 8}, {"a": 1.0}, {"a", "v"}, {"v"}, {"v"})
    assert [(t.nbytes, t.seconds, t.again) for t in trades] == [
        (0, 1.0, {"a", "v"}),
        (8, 0.0, set()),  # the view as well, since that costs nothing
    ]


def test_a_larger_budget_never_repeats_more() -> None:
    """Also if peaks do not rise with the bytes that are kept."""
    rng = random.Random(0)
    trades = [Trade(i, float(20 - i)) for i in range(20)]
    for _ in range(50):
        peaks = {t.nbytes: rng.randint(0, 30) for t in trades}
        found = [largest_that_fits(trades, lambda t, p=peaks: p[t.nbytes], b) for b in range(31)]
        times = [one[0].seconds for one in found if one is not None]
        assert times == sorted(times, reverse=True)
        assert all(one is None or one[1] <= b for b, one in enumerate(found))


def test_several_programs_share_the_bytes() -> None:
    """What the second keeps is there three times: 20 bytes are the first one's, or nothing."""
    first = [Trade(0, 5.0, frozenset("ab")), Trade(20, 0.0)]
    second = [Trade(0, 4.0, frozenset("a")), Trade(10, 0.0)]
    found = joined([first, second], [1, 3])
    assert [(one.nbytes, one.seconds) for one in found] == [(0, 9.0), (20, 4.0), (50, 0.0)]
    assert [apart(one, 2) for one in found] == [[{"a", "b"}, {"a"}], [set(), {"a"}], [set(), set()]]
    assert together([first[0], second[0]]).again == found[0].again
