"""How far runs may be apart: the comparison of arrays, on numbers alone."""

from kdist.verification.observed import Observed, compare_runs
from kdist.verification.tolerance import TOLERANCES, gap

import numpy as np
import pytest

INF, NAN = float("inf"), float("nan")

# reference, other, allowed, error: None where they are equal.
GAPS = {
    "equal": ([1.0, 2.0], [1.0, 2.0], 0.0, None),
    "within": ([1.0, 2.0], [1.0, 2.5], 0.5, None),
    "beyond": ([1.0, 2.0], [1.0, 2.5], 0.4, 0.5),
    "negative": ([-2.0], [2.0], 3.0, 4.0),
    "scalars": (1.0, 1.5, 0.1, 0.5),
    "zero scale": ([0.0, 0.0], [0.0, 1e-300], 0.0, 1e-300),
    "zeros of both signs": ([0.0], [-0.0], 0.0, None),
    "nan on both": ([NAN, 1.0], [NAN, 1.0], 0.0, None),
    "nan on the reference": ([NAN, 1.0], [0.0, 1.0], 1e9, INF),
    "nan on the other": ([0.0, 1.0], [NAN, 1.0], 1e9, INF),
    "inf on both": ([INF, -INF], [INF, -INF], 0.0, None),
    "inf on one": ([INF], [1.0], 1e9, INF),
    "inf of both signs": ([INF], [-INF], 1e9, INF),
    "nan and inf": ([NAN], [INF], 1e9, INF),
    "empty": (np.zeros((0, 3)), np.zeros((0, 3)), 0.0, None),
    "empty of another shape": (np.zeros((0, 3)), np.zeros((0, 2)), 1e9, INF),
    "shape": (np.ones((2, 1)), np.ones(2), 1e9, INF),
    "a shape that would broadcast": (np.ones((1, 2)), np.ones((2, 2)), 1e9, INF),
    "dtype": (np.ones(2), np.ones(2, "float32"), 1e9, INF),
    "integers are exact": ([10**9, 5], [10**9, 6], 10.0, 1.0),
    "integers beyond float64": ([2**53], [2**53 + 1], 10.0, 1.0),
    "equal integers": ([2**53], [2**53], 0.0, None),
    "booleans": ([True, False], [True, True], 10.0, 1.0),
}


@pytest.mark.parametrize("case", GAPS)
def test_a_gap_is_the_largest_difference(case):
    one, other, allowed, error = GAPS[case]
    found = gap(np.asarray(one), np.asarray(other), allowed)
    assert (None if found is None else found.error) == error
    if found is not None:
        assert "on one device" in found.text and "over the mesh" in found.text


def test_a_gap_names_the_worst_entry_and_how_many_are_off():
    one = np.array([[1.0, 2.0], [3.0, NAN]])
    other = np.array([[1.5, 2.0], [5.0, NAN]])
    found = gap(one, other, 0.1, names=("expected", "got"))
    assert (found.error, found.scale, found.allowed) == (2.0, 3.0, 0.1)
    assert found.text == "3 expected, 5 got at [1, 0], 2 of 4 entries off"
    shown = gap(np.array(1.0), np.array(1.0 + 1e-8), 1e-9).text
    assert "1.00000001 over the mesh" in shown


def test_ignored_entries_are_not_compared():
    one, ignored = np.zeros(2), np.array([True, False])
    assert gap(one, np.array([NAN, 0.0]), 0.0, ignored) is None
    assert gap(one, np.array([0.0, 1.0]), 0.0, ignored).error == 1.0


def test_arrays_are_compared_by_their_own_scale():
    one = {"a": np.array([1e6, 1.0]), "b": np.array([1e-3]), "c": np.array([0.0])}
    off = {"a": one["a"] * (1 + 1e-8), "b": one["b"] + 1e-11, "c": one["c"] + 1e-5}
    empty = {"output": {}, "metric": {}, "gradient": None, "state": {}}
    runs = [Observed(**{**empty, "loss": arrays}) for arrays in (one, off)]
    found = compare_runs(*runs, TOLERANCES["float64"])
    assert [d.name for d in found.differences] == ["c", "a"]
    missing = Observed(**{**empty, "loss": {"a": one["a"]}})
    found = compare_runs(missing, runs[0], TOLERANCES["float64"])
    assert {d.name for d in found.differences} == {"b", "c"}
    assert all(d.error == np.inf for d in found.differences)


def test_what_only_rounding_decides_is_left_out():
    """A gradient of 1e-20 gives Lion a whole step, of either sign; an exact zero gives none."""
    gradient = {"up/kernel": np.array([1.0, 1e-20, 0.0])}
    empty = {"output": {}, "loss": {}, "metric": {}, "state": {}, "gradient": gradient}
    one = {"weight": {"up/kernel": np.ones(3)}, "slot": {"lion/up_kernel_momentum": np.ones(3)}}
    for entry, found in ((0, 2), (1, 0), (2, 2)):
        moved = np.ones(3)
        moved[entry] = 0.9
        mesh = {kind: dict.fromkeys(arrays, moved) for kind, arrays in one.items()}
        runs = Observed(**empty, **one), Observed(**empty, **mesh)
        assert len(compare_runs(*runs, TOLERANCES["float64"]).differences) == found
