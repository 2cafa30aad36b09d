"""The fewest bytes that must be kept, against every choice there is."""

from __future__ import annotations

import itertools
from typing import Any

from kdist.graphs.chunks import ProgramGraph, node_of
from kdist.graphs.minimum_cut import fewest_kept

import hypothesis
from hypothesis import strategies as st


def enough(graph: ProgramGraph, kept: set[str], repeatable: set[str], read: set[str]) -> bool:
    """Whether all that is read is kept, or can be computed again."""
    waiting = list(read)
    while waiting:
        name = waiting.pop()
        if name in kept:
            continue
        if name not in repeatable:
            return False
        waiting.extend(node_of(r) for r in graph.inputs[name])
    return True


@hypothesis.given(st.data())
def test_no_choice_keeps_less(draws: Any) -> None:
    count = draws.draw(st.integers(1, 9))
    inputs: dict[str, list[str]] = {"n0": []}
    for i in range(1, count):
        pool = [f"n{j}:0:0" for j in range(i)]
        inputs[f"n{i}"] = draws.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    graph, names = ProgramGraph(inputs, []), list(inputs)
    nbytes = {n: draws.draw(st.integers(1, 20)) for n in names}
    repeatable = set(draws.draw(st.sets(st.sampled_from(names)))) - {"n0"}
    read = draws.draw(st.sets(st.sampled_from(names), min_size=1))
    kept = fewest_kept(graph, nbytes, repeatable, read)
    assert enough(graph, kept, repeatable, read)
    choices = itertools.chain.from_iterable(
        itertools.combinations(names, k) for k in range(count + 1)
    )
    least = min(
        sum(nbytes[n] for n in one) for one in choices if enough(graph, {*one}, repeatable, read)
    )
    assert sum(nbytes[n] for n in kept) == least
