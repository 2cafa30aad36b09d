"""The heaviest antichain, against trying all sets."""

from __future__ import annotations

from kdist.graphs.antichain import heaviest_antichain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st


def heaviest(weights: list[int], after: list[int]) -> list[int]:
    """Of an order of which bits of integers tell what comes after each element."""
    count = range(len(weights))
    order = np.array([[bits >> j & 1 for j in count] for bits in after], bool)
    return heaviest_antichain(weights, order.reshape(len(weights), len(weights)))


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Weights, and what comes after each element."""
    count = draw(st.integers(0, 8))
    weights = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    after = [0] * count
    for i in reversed(range(count)):
        for j in range(i + 1, count):
            if draw(st.booleans()):
                after[i] |= (1 << j) | after[j]
    return weights, after


def antichain(members: list[int], after: list[int]) -> bool:
    return not any(after[i] >> j & 1 for i in members for j in members)


@settings(max_examples=200, deadline=None)
@given(orders())
def test_no_antichain_is_heavier(order: tuple[list[int], list[int]]) -> None:
    weights, after = order
    count = len(weights)
    sets = ([i for i in range(count) if bits >> i & 1] for bits in range(1 << count))
    best = max(sum(weights[i] for i in each) for each in sets if antichain(each, after))
    found = heaviest(weights, after)
    assert antichain(found, after)
    assert sum(weights[i] for i in found) == best


def test_a_chain_gives_its_heaviest() -> None:
    assert heaviest([3, 7, 5], [0b110, 0b100, 0]) == [1]


def test_one_heavy_element_against_two_that_come_after() -> None:
    assert heaviest([5, 2, 2], [0b110, 0, 0]) == [0]
    assert heaviest([5, 3, 3], [0b110, 0, 0]) == [1, 2]


def test_a_path_that_takes_flow_back() -> None:
    # 0 and 1 before 2, 1 before 3: the first path found is not among the best.
    assert heaviest([2, 2, 2, 2], [0b100, 0b1100, 0, 0]) in ([0, 1], [2, 3], [0, 3])


def test_weightless_elements_are_left_out() -> None:
    assert heaviest([0, 1, 0], [0, 0, 0]) == [1]
    assert heaviest([], []) == []
