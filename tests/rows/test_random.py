"""Held against numbers: what is said of random functions is what they do with their rows.

A function whose rows are said to stay apart must have a Jacobian of zero from a row to the output
rows of others, and give, part by part, what it gives as a whole; means and sums must be that of
their parts.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from kdist.rows import RowDependence, study

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from .random_functions import START, STEPS, Dim, Step, function_of, value

X = np.random.default_rng(0).normal(size=(3, 2, 3))
SPEC = tf.TensorSpec((None, 2, 3), tf.float64)
CUT = 1
"""Rows of the first part."""

some_steps = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5039)), min_size=1, max_size=6
)
many = hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def told(steps: Sequence[Step]) -> tuple[RowDependence, bool, list[Dim]]:
    dims: list[Dim] = list(START)
    found = study(function_of(steps, dims), SPEC)
    return found.outputs[0], found.sized[0], dims


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    scale = 1 + np.max(np.abs(a), initial=0.0)
    return bool(np.all(np.abs(a - b) <= 1e-9 * scale))


def rows_meet(steps: Sequence[Step], dims: Sequence[Dim]) -> bool:
    """Whether the numeric Jacobian from row j to an output row i is not zero for some i != j."""
    if not dims or dims[0][1] != 1:
        return True
    whole = value(steps, X).reshape(3, -1)
    for j in range(3):
        moved = X.copy()
        moved[j] += np.random.default_rng(j).normal(size=moved[j].shape)
        after = value(steps, moved).reshape(3, -1)
        others = [i for i in range(3) if i != j]
        if not equal(whole[others], after[others]):
            return True
    return False


def check(steps: Sequence[Step]) -> RowDependence:
    flow, sized, dims = told(steps)
    if flow is RowDependence.MIXED:
        return flow
    whole, one, two = value(steps, X), value(steps, X[:CUT]), value(steps, X[CUT:])
    if flow is RowDependence.ROWS:
        assert not rows_meet(steps, dims)
        assert equal(np.concatenate([one, two]), whole)
    elif flow is RowDependence.MEAN:
        assert equal((CUT * one + (3 - CUT) * two) / 3, whole)
    elif flow is RowDependence.SUM:
        assert equal(one + two, whole)
    elif not sized:
        assert equal(one, two) and equal(one, whole)
    return flow


@many
@hypothesis.given(some_steps)
def test_what_is_said_is_what_numbers_show(steps: list[Step]) -> None:
    check(steps)


@pytest.mark.long
@hypothesis.settings(many, max_examples=4000)
@hypothesis.given(some_steps)
def test_the_same_on_many(steps: list[Step]) -> None:
    check(steps)


def test_every_kind_is_met_and_most_of_what_stays_apart_is_recognised() -> None:
    """The random functions are no easy ones, and "mixed" is no answer for all."""
    rng = np.random.default_rng(0)
    names = sorted(STEPS)
    found: collections.Counter[tuple[RowDependence, bool]] = collections.Counter()
    for _ in range(150):
        length = rng.integers(1, 6)
        steps = [(str(rng.choice(names)), int(rng.integers(5040))) for _ in range(length)]
        flow, _, dims = told(steps)
        found[flow, rows_meet(steps, dims)] += 1
    assert {RowDependence.ROWS, RowDependence.MEAN, RowDependence.SUM, RowDependence.MIXED} <= {
        flow for flow, _ in found
    }
    apart = found[RowDependence.ROWS, False]
    assert apart > 20
    assert found[RowDependence.MIXED, False] < apart, found
    assert found[RowDependence.ROWS, True] == 0
