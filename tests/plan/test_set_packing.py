"""Sets without common members, of the largest weight together."""

from __future__ import annotations

import itertools

from kdist.plan import set_packing
from kdist.plan.set_packing import heaviest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sets = st.tuples(st.integers(1, 20), st.frozensets(st.integers(0, 9), min_size=1, max_size=4))


def apart(chosen: list[frozenset[int]]) -> bool:
    return sum(map(len, chosen)) == len(frozenset().union(*chosen))


@settings(max_examples=200, deadline=None)
@given(st.lists(sets, max_size=9))
def test_it_is_the_best_of_all(weighted: list[tuple[int, frozenset[int]]]) -> None:
    found = heaviest(weighted)
    assert apart([weighted[n][1] for n in found])
    every = (
        ways
        for count in range(len(weighted) + 1)
        for ways in itertools.combinations(weighted, count)
        if apart([members for _, members in ways])
    )
    assert sum(weighted[n][0] for n in found) == max(sum(w for w, _ in ways) for ways in every)


def test_a_long_chain_takes_no_long_search() -> None:
    chain = [(1.0 + n * n % 7, (n, n + 1)) for n in range(400)]
    best, before = 0.0, 0.0  # of those up to a set, and up to the one before it
    for weight, _ in chain:
        best, before = max(best, before + weight), best
    assert sum(chain[n][0] for n in heaviest(chain)) == best


def test_a_search_that_would_take_too_long_takes_the_heaviest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(set_packing, "MOST_SEARCHED", 0)
    assert heaviest([(2, "ab"), (3, "bc"), (2, "cd"), (1, "e")]) == [1, 3]


def test_no_search_is_endless_or_too_deep() -> None:
    grid = [(1.0, ((i, j), (i, j + 1))) for i in range(30) for j in range(30)]
    grid += [(1.0 + i % 2, ((i, j), (i + 1, j))) for i in range(30) for j in range(30)]
    clique = [(1.0 + n % 7, (0, n + 1)) for n in range(200)]
    for weighted in (grid, clique):
        members = [weighted[n][1] for n in heaviest(weighted)]
        assert members
        assert len(set().union(*members)) == sum(map(len, members))
