"""The list of tests that the default suite leaves out names tests that exist."""

import ast
from pathlib import Path

from ..tiers import chosen, taken, wide

CHECKOUT = Path(__file__).resolve().parents[2]


def test_every_name_on_the_list_is_a_test():
    for name in wide():
        file, _, function = name.partition("::")
        tree = ast.parse((CHECKOUT / file).read_text(encoding="utf-8"))
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, name


def test_rows_that_ran_are_read_from_a_file(tmp_path):
    rows = [("a", "test_x[1]", 9, ""), ("a", "test_x[2]", 7, ""), ("a", "test_y", 0, "<skipped/>")]
    cases = [
        f'<testcase classname="tests.{c}" name="{n}" time="{t}">{inside}</testcase>'
        for c, n, t, inside in rows
    ]
    (tmp_path / "run.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert taken(tmp_path / "run.xml") == {"tests/a.py::test_x": [9, 7]}


def test_the_cheapest_of_a_file_stays_and_of_the_others_those_that_the_time_allows():
    rows = {"a.py::x": [9, 9], "a.py::y": [8], "b.py::z": [1], "b.py::w": [2, 2], "b.py::v": [4]}
    assert chosen(rows, seconds=13) == ["a.py::x", "b.py::v"]
    assert chosen(rows, seconds=0) == ["a.py::x", "b.py::v", "b.py::w"]
    assert chosen(rows, seconds=35) == []
