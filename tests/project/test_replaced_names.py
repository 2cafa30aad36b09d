"""What a test replaces in the product is there: a name that has moved is found at once.

Rows of the wide tier run by chance; without this, one whose name has moved is red some day.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def imported(tree: ast.Module) -> dict[str, str]:
    """What names of a file stand for, of those that it imports from the product."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kdist":
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def replaced(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Full names of what `monkeypatch.setattr` replaces in the product, with their lines."""
    names = imported(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr"):
            continue
        place, *others = node.args
        if isinstance(place, ast.Constant):
            yield str(place.value), node.lineno
        elif len(others) == 2 and isinstance(others[0], ast.Constant):
            first, _, rest = ast.unparse(place).partition(".")
            if first in names:
                parts = [names[first], rest, str(others[0].value)]
                yield ".".join(filter(None, parts)), node.lineno


def there(name: str) -> bool:
    """Whether a dotted name is an attribute of a module, or of something in one."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        try:
            functools.reduce(getattr, parts[end:], module)
        except AttributeError:
            return False
        return True
    return False


def test_names_are_found_where_they_are() -> None:
    code = "from kdist.plan import plan as p\nmonkeypatch.setattr(p.Plan, 'traffic', None)"
    assert [*replaced(ast.parse(code))] == [("kdist.plan.plan.Plan.traffic", 2)]
    assert there("kdist.plan.plan.Plan.traffic") and there("kdist.plan.plan")
    assert not there("kdist.plan.plan.Plan.trafic") and not there("kdist.nowhere.at_all")


def test_what_is_replaced_is_there() -> None:
    gone = [
        f"{file.relative_to(TESTS)}:{line}: {name}"
        for file in FILES
        for name, line in replaced(ast.parse(file.read_text(encoding="utf-8")))
        if name.startswith("kdist") and not there(name)
    ]
    assert not gone, "moved, or renamed"
