"""Which tests the default suite leaves to continuous integration, so that it takes ten minutes.

`wide.txt` lists test functions by file. It is made of the durations of a run of all that
continuous integration runs, on a machine that does nothing else:

    sh run.sh test --wide --junitxml=durations.xml
    sh run.sh python tests/tiers.py durations.xml [seconds]

Those functions stay whose rows are cheapest in the mean, as many as ten minutes allow. Of a file
of which none would stay, one row of the cheapest does ("[1:]" is on the list, its other rows), so
that no file is without a test in the default suite. What the run has left out stays on the list.
"""

from __future__ import annotations

import collections
import statistics
import sys
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

LIST = Path(__file__).with_name("wide.txt")
SECONDS = 960.0
"""So much work is left to the default suite. Two workers do it in eight minutes, and need one or
two more to begin, to find the tests and to import what they use."""
OTHERS = "[1:]"
"""Behind a function on the list: all rows but the first."""


def wide() -> frozenset[str]:
    """The functions on the list, as `tests/room/test_file.py::test_function`."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def function_of(node: str) -> str:
    """The function of a test, without its parameters."""
    return node.partition("[")[0]


def file_of(node: str) -> str:
    """The file of a test."""
    return node.partition("::")[0]


class Tiers:
    """Tells tests that the default suite leaves out, as they are collected."""

    def __init__(self) -> None:
        self._listed = wide()
        self._seen: set[str] = set()

    def leaves_out(self, node: str) -> bool:
        """Whether a test is on the list; the first row of a function is not one of the others."""
        function = function_of(node)
        if function + OTHERS not in self._listed:
            return function in self._listed
        first = function not in self._seen
        self._seen.add(function)
        return not first


def taken(durations: Path) -> dict[str, list[float]]:
    """Seconds of each row that ran, by function, in the order of a file in JUnit's format."""
    rows: dict[str, list[float]] = collections.defaultdict(list)
    for case in xml.etree.ElementTree.parse(durations).iter("testcase"):
        if case.find("skipped") is None:
            file = case.attrib["classname"].replace(".", "/") + ".py"
            rows[f"{file}::{function_of(case.attrib['name'])}"].append(float(case.attrib["time"]))
    return rows


def chosen(rows: Mapping[str, Sequence[float]], seconds: float = SECONDS) -> list[str]:
    """What belongs on the list, of those that ran.

    Args:
        rows: See `taken`.
        seconds: What stays may take together.
    """
    alone: dict[str, str] = {}
    for name in sorted(rows, key=lambda n: rows[n][0]):
        alone.setdefault(file_of(name), name)
    seconds -= sum(rows[name][0] for name in alone.values())
    found = set()
    for name in sorted(rows, key=lambda n: statistics.mean(rows[n])):
        row = alone.get(file_of(name))
        seconds -= sum(rows[name]) - (rows[row][0] if row else 0)
        if seconds < 0:
            found.add(name)
        else:
            alone.pop(file_of(name), None)
    for name in alone.values():
        found.remove(name)
        if len(rows[name]) > 1:
            found.add(name + OTHERS)
    return sorted(found)


def listed(rows: Mapping[str, Sequence[float]], seconds: float) -> list[str]:
    """What belongs on the list: what is chosen, and what the run has left out.

    Args:
        rows: See `taken`.
        seconds: See `chosen`.
    """
    found = set(chosen(rows, seconds))
    for name in wide():
        ran = rows.get(name.removesuffix(OTHERS), ())
        # Of a function with others on the list, a run without `--wide` has the first row alone.
        if not ran or (name.endswith(OTHERS) and len(ran) == 1):
            found.add(name)
    return sorted(name for name in found if name.removesuffix(OTHERS) not in found - {name})


def main(durations: Path, seconds: float = SECONDS) -> None:
    """Writes the list."""
    LIST.write_text("\n".join(listed(taken(durations), seconds)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
