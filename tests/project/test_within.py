"""`--within`: the order loses no test, default ones come first, and what is left out is said."""

from hypothesis import given
from hypothesis import strategies as st

from ..within import default_first, summary


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.floats(0, 1))
def test_each_worker_meets_its_default_tests_first(
    wide: list[bool], workers: int, begin: float
) -> None:
    items = list(enumerate(wide))
    order = default_first(items, lambda item: item[1], workers, begin)
    assert sorted(order) == items
    # A change from wide to default is where the next worker's items begin.
    back = sum(before[1] and not after[1] for before, after in zip(order, order[1:], strict=False))
    assert back <= workers - 1
    if workers == 1 and begin in (0, 1):
        assert order == sorted(items, key=lambda item: item[1])


def test_workers_begin_with_as_many() -> None:
    order = default_first(range(100), lambda i: i % 5 == 0, 2)
    assert order[:40] == [i for i in range(50) if i % 5]
    assert order[50:90] == [i for i in range(50, 100) if i % 5]


def test_wide_ones_begin_where_asked() -> None:
    order = default_first(range(20), lambda i: i % 2 == 1, 1, begin=0.8)
    assert order == [*range(0, 20, 2), 17, 19, *range(1, 17, 2)]


def test_what_is_left_out_is_said() -> None:
    nodes = ["tests/a.py::test_x[1]", "tests/a.py::test_x[2]", "tests/b.py::test_y"]
    assert summary(nodes, 60, 0.25) == (
        "--within=60 --begin=0.25: 3 wide tests were left out for time: tests/a.py 2, tests/b.py 1"
    )
    assert "all wide tests ran" in summary([], 60)
