"""One name for one thing: no two public classes are called alike."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]

OF_TWO_PACKAGES = {
    "Message": {"kdist/comm/messages.py", "kdist/pipeline/communication.py"},
    "Schedule": {"kdist/comm/messages.py", "kdist/pipeline/schedule.py"},
    "ShardedCheckpoint": {"callbacks/sharded_checkpoint.py", "kdist/ray/callbacks.py"},
}
"""Public names of packages that users write with the package's name before them."""


def _modules_of_classes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for room in ("kdist", "callbacks", "layers"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].add(str(path.relative_to(ROOT)))
    return found


def test_no_two_classes_have_one_name() -> None:
    shared = {name: paths for name, paths in _modules_of_classes().items() if len(paths) > 1}
    assert shared == OF_TWO_PACKAGES
