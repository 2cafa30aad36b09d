"""Rooms of the house: a package imports from those below it only, and never in a circle."""

import ast
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = [
    "display",
    "_compat",
    "cluster",
    "sharding",
    "layers",
    "storage",
    "pipeline",
    "comm",
    "config",
    "graphs",
    "plan",
    "program",
    "rows",
    "dtensor",
    "optimizer",
    "stages",
    "runtime",
    "calls",
    "report",
    "api",
    "checkpoint",
    "export",
    "callbacks",
    "verification",
    "launch",
    "ray",
]
"""From the ground up."""

ABOVE = {
    ("api.parallelize", "verification.first_step"),
    ("pipeline.schedule", "pipeline.chart"),
    ("pipeline.schedule", "pipeline.simulate"),
}
"""Late imports: training that checks itself as users would, and `Schedule.chart()`."""


def _files() -> dict[str, Path]:
    tops = {
        CHECKOUT / "kdist": "",
        CHECKOUT / "layers": "layers.",
        CHECKOUT / "callbacks": "callbacks.",
    }
    return {
        prefix
        + ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__"): path
        for top, prefix in tops.items()
        for path in top.rglob("*.py")
    }


FILES = _files()


def _imports(name: str) -> set[str]:
    """The modules of kdist that a module imports when it runs, at its top or later."""
    found = set()
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    hints = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n)]
    skipped = {id(node) for hint in hints for node in ast.walk(hint)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {one for one in within if one.removeprefix("kdist.") in FILES}
            found |= modules or {node.module}
    known = {one.removeprefix("kdist.") for one in found if one.split(".")[0] == "kdist"}
    return known - {name}


def test_a_room_imports_lower_rooms_only() -> None:
    floors = {room: floor for floor, room in enumerate([*ROOMS, "kdist"])}
    found = {
        (name, module)
        for name in FILES.keys() - {"__init__"}
        for module in _imports(name)
        if floors[module.split(".")[0]] > floors[name.split(".")[0]]
    }
    assert found <= ABOVE


def test_no_circle_of_modules() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " > ".join((*path, name))
        if name not in done:
            for module in _imports(name) & set(FILES):
                if (name, module) not in ABOVE:
                    visit(module, (*path, name))
            done.add(name)

    for name in FILES:
        visit(name, ())
