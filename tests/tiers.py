"""Which tests the default suite leaves to continuous integration, so that it takes ten minutes.

`wide.txt` lists test functions by file. It is made of the durations of a run of all that
continuous integration runs, on a machine that does nothing else:

    sh run.sh test --wide --junitxml=durations.xml
    sh run.sh python tests/tiers.py durations.xml

Those functions stay whose rows are cheapest in the mean, as many as ten minutes allow; the cheapest
of each file stays too, so that no file is without a test in the default suite. What the run has
left out stays on the list.
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


def wide() -> frozenset[str]:
    """The functions on the list, as `tests/room/test_file.py::test_function`."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def function_of(node: str) -> str:
    """The function of a test, without its parameters."""
    return node.partition("[")[0]


def taken(durations: Path) -> dict[str, list[float]]:
    """Seconds of each row that ran, by function, in the order of a file in JUnit's format."""
    rows: dict[str, list[float]] = collections.defaultdict(list)
    for case in xml.etree.ElementTree.parse(durations).iter("testcase"):
        if case.find("skipped") is None:
            file = case.attrib["classname"].replace(".", "/") + ".py"
            rows[f"{file}::{function_of(case.attrib['name'])}"].append(float(case.attrib["time"]))
    return rows


def chosen(rows: Mapping[str, Sequence[float]], seconds: float = SECONDS) -> list[str]:
    """The functions that belong on the list, of those that ran.

    Args:
        rows: See `taken`.
        seconds: What those that are not on the list may take together.
    """
    totals = {name: sum(times) for name, times in rows.items()}
    cheapest: dict[str, str] = {}
    for name in sorted(rows, key=totals.__getitem__):
        cheapest.setdefault(name.partition("::")[0], name)
    left = seconds - sum(totals[name] for name in cheapest.values())
    found = []
    for name in sorted(
        rows.keys() - set(cheapest.values()), key=lambda n: statistics.mean(rows[n])
    ):
        left -= totals[name]
        if left < 0:
            found.append(name)
    return sorted(found)


def main(durations: Path) -> None:
    """Writes the list."""
    rows = taken(durations)
    names = {*chosen(rows), *(wide() - rows.keys())}
    LIST.write_text("\n".join(sorted(names)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
