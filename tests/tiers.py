"""Which tests the default suite leaves to continuous integration, so that it takes ten minutes.

`wide.txt` lists test functions by file. It is made of the durations of a run of all that
continuous integration runs:

    sh run.sh test --wide --junitxml=durations.xml
    sh run.sh python tests/tiers.py durations.xml

A function is on the list if its rows take long in the mean; the cheapest of each file is not, so
that no file is without a test in the default suite.
"""

from __future__ import annotations

import collections
import statistics
import sys
import xml.etree.ElementTree
from pathlib import Path

LIST = Path(__file__).with_name("wide.txt")
SECONDS = 1.0
"""Functions whose rows take longer, in the mean, are on the list."""


def wide() -> frozenset[str]:
    """The functions on the list, as `tests/room/test_file.py::test_function`."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def function_of(node: str) -> str:
    """The function of a test, without its parameters."""
    return node.partition("[")[0]


def chosen(durations: Path) -> list[str]:
    """The functions that belong on the list, by a file in JUnit's format."""
    rows: dict[str, dict[str, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for case in xml.etree.ElementTree.parse(durations).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        rows[file][function_of(case.attrib["name"])].append(float(case.attrib["time"]))
    found = []
    for file, functions in rows.items():
        means = {name: statistics.mean(times) for name, times in functions.items()}
        kept = min(means, key=lambda name: sum(functions[name]))
        found += [f"{file}::{n}" for n, mean in means.items() if mean > SECONDS and n != kept]
    return sorted(found)


if __name__ == "__main__":
    LIST.write_text("\n".join(chosen(Path(sys.argv[1]))) + "\n", encoding="utf-8")
