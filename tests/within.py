"""`--within MINUTES`: on a slow machine, the default suite whole, and of the wide rows what fits.

Machines that test are shared: the same suite has taken half an hour and an hour and a half. A run
that a limit from outside cuts off tells nothing; one that ends by itself says what it left out.
Which wide rows fit differs from run to run, so that none goes unseen for long.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
REASON = "left out by --within"


def default_first(
    items: Sequence[T], is_wide: Callable[[T], bool], workers: int, begin: float = 0.0
) -> list[T]:
    """The items so that each of several workers meets its default ones before its wide ones.

    pytest-xdist's `worksteal` gives each worker a run of neighbours of one length to begin with;
    one that has ended takes from the end of another's. Order within either kind stays.

    Args:
        items: The tests, in their order.
        is_wide: Whether a test is beyond the default suite.
        workers: How many workers share them.
        begin: Which share of the wide ones, from 0 to 1, comes after the others.
    """
    kinds = [[item for item in items if is_wide(item) == wide] for wide in (False, True)]
    first = int(begin * len(kinds[1]))
    kinds[1] = kinds[1][first:] + kinds[1][:first]
    found: list[T] = []
    for worker in range(workers):
        for kind in kinds:
            start, end = (len(kind) * (worker + k) // workers for k in (0, 1))
            found += kind[start:end]
    return found


def summary(left_out: Iterable[str], minutes: float, begin: float = 0.0) -> str:
    """A line that says how many tests were left out for time, and of which files how many.

    Args:
        left_out: Tests, as `tests/room/test_file.py::test_function[row]`.
        minutes: The limit.
        begin: Which share of the wide ones came last.
    """
    files = collections.Counter(node.partition("::")[0] for node in left_out)
    if not files:
        return f"--within={minutes:g}: all wide tests ran"
    listed = ", ".join(f"{name} {count}" for name, count in sorted(files.items()))
    said = f"--within={minutes:g} --begin={begin:g}"
    return f"{said}: {files.total()} wide tests were left out for time: {listed}"
