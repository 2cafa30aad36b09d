"""The list of tests that the default suite leaves out names tests that exist."""

import ast
from pathlib import Path

from .. import tiers
from ..tiers import OTHERS, Tiers, chosen, taken, wide

CHECKOUT = Path(__file__).resolve().parents[2]


def test_every_name_on_the_list_is_a_test():
    for name in wide():
        file, _, function = name.removesuffix(OTHERS).partition("::")
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


def test_the_cheapest_stay_and_one_row_of_each_file():
    rows = {"a.py::x": [9, 8], "a.py::y": [7, 9.5]}
    rows |= {"b.py::z": [1], "b.py::w": [2, 2], "c.py::v": [4]}
    assert chosen(rows, seconds=43) == []
    assert chosen(rows, seconds=40) == ["a.py::x"]
    assert chosen(rows, seconds=16) == ["a.py::x", "a.py::y[1:]"]
    assert chosen(rows, seconds=12) == ["a.py::x", "a.py::y[1:]", "b.py::w"]


def test_what_a_run_left_out_stays_on_the_list(monkeypatch):
    monkeypatch.setattr(tiers, "wide", lambda: frozenset({"a.py::x[1:]", "a.py::y", "b.py::z[1:]"}))
    rows = {"a.py::x": [3], "a.py::w": [1], "b.py::z": [2, 2]}
    assert tiers.listed(rows, seconds=9) == ["a.py::x[1:]", "a.py::y"]
    assert tiers.listed(rows, seconds=4) == ["a.py::x", "a.py::y", "b.py::z[1:]"]


def test_of_some_functions_the_first_row_stays(monkeypatch):
    monkeypatch.setattr("tests.tiers.wide", lambda: frozenset({"a.py::x[1:]", "a.py::y"}))
    nodes = ["a.py::x[1]", "a.py::y", "a.py::x[2]", "a.py::z[1]", "a.py::x[3]"]
    assert list(filter(Tiers().leaves_out, nodes)) == ["a.py::y", "a.py::x[2]", "a.py::x[3]"]
