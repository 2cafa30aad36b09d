"""Docstrings have one form: sentences with a capital and a full stop, also in their sections."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = sorted(
    path
    for path in (*(CHECKOUT / "kdist").iterdir(), CHECKOUT / "layers", CHECKOUT / "callbacks")
    if (path / "__init__.py").is_file()
)
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
ENTRY = re.compile(r"^    (\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)$")
CODE = re.compile(r"^(?:(?:bfloat|float|int|uint)\d+\b|tf\.|[a-z][.,;](?: |$))")
"""What begins a sentence in lower case: dtypes, names of TensorFlow, letters of a formula."""


def entries_of(docstring: str) -> Iterator[tuple[str, str]]:
    """The names in the sections of a docstring, and what is said of each."""
    named, name, said = False, "", ""
    for line in (*docstring.splitlines(), ""):
        section, entry = SECTION.match(line), ENTRY.match(line) if named else None
        if name and (entry or section or not line.startswith("     ")):
            yield name, said
            name = ""
        if entry:
            name, said = entry.groups()
        elif name:
            said += " " + line.strip()
        if section or not line.startswith(" "):
            named = section is not None and section[1] in ("Args", "Attributes", "Raises")


def faults_in(docstring: str) -> list[str]:
    """What of a docstring has another form."""
    found = [docstring.splitlines()[0]] if docstring.startswith("Returns ") else []
    for name, said in entries_of(docstring):
        begins = not said[:1].islower() or CODE.match(said)
        if not begins or not re.search(r"[.?!:)`\"]$", said):
            found.append(f"{name}: {said}")
    return found


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_docstrings_of_a_room_have_the_form(room: Path) -> None:
    faults = [
        f"{path.name}: {fault}"
        for path in sorted(room.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for fault in faults_in(ast.get_docstring(node) or "")
    ]
    assert faults == []


def test_another_form_is_found() -> None:
    docstring = """Returns a sum.

    Args:
        first: the first summand.
        second: Another
            one
        dtype: float32 or float64.
    """
    faults = faults_in("\n".join(line.removeprefix("    ") for line in docstring.splitlines()))
    assert faults == ["Returns a sum.", "first: the first summand.", "second: Another one"]
