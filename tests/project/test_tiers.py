"""The list of tests that the default suite leaves out names tests that exist."""

import ast
from pathlib import Path

from ..tiers import chosen, wide

CHECKOUT = Path(__file__).resolve().parents[2]


def test_every_name_on_the_list_is_a_test():
    for name in wide():
        file, _, function = name.partition("::")
        tree = ast.parse((CHECKOUT / file).read_text(encoding="utf-8"))
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, name


def test_the_cheapest_of_a_file_stays(tmp_path):
    rows = [("a", "test_x[1]", 9), ("a", "test_x[2]", 9), ("a", "test_y", 8), ("b", "test_z", 1)]
    cases = [f'<testcase classname="tests.{c}" name="{n}" time="{t}"/>' for c, n, t in rows]
    (tmp_path / "run.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert chosen(tmp_path / "run.xml") == ["tests/a.py::test_x"]
