"""What pages and docstrings name in backticks exists: modules, functions, attributes of classes."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
KDIST = CHECKOUT / "kdist"
MAPPED = {"layers": CHECKOUT / "layers", "callbacks": CHECKOUT / "callbacks"}
"""Packages of kdist whose folders lie elsewhere; see setup.cfg."""
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
MODULES = sorted(path for at in (KDIST, *MAPPED.values()) for path in at.rglob("*.py"))
QUOTED = re.compile(r"`([A-Za-z_][\w./]*)(?:\([^`\n]*\))?`")
FILE = re.compile(r"\.(csv|ini|json|keras|md|png|py|sh|svg|txt|yaml)$")
LISTED = re.compile(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)")
"""A file and, in brackets, names in it: `dtensor/limits.py` (`GATHER_ON_READ`)."""


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """All that a module defines or imports, and what its classes have."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return frozenset(found)


@functools.cache
def classes() -> dict[str, tuple[frozenset[str], tuple[str, ...]]]:
    """Per class of kdist, what it has of its own, and the names of its bases."""
    found = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = names_of_class(node)
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                found[node.name] = own | found.get(node.name, (frozenset(), ()))[0], tuple(bases)
    return found


def names_of_class(node: ast.ClassDef) -> frozenset[str]:
    inside = [one for one in ast.walk(node) if one is not node]
    stored = [n for n in inside if isinstance(getattr(n, "ctx", None), ast.Store)]
    functions = {one.name for one in inside if isinstance(one, ast.FunctionDef)}
    return frozenset(functions | {getattr(n, "attr", getattr(n, "id", "")) for n in stored})


def has(name: str, attribute: str) -> bool:
    """Whether a class has an attribute, or may have inherited it from a class of others."""
    if name not in classes():
        return True
    own, bases = classes()[name]
    return attribute in own or any(has(base, attribute) for base in bases)


def in_kdist(dotted: str) -> bool:
    """Whether a path such as `kdist.comm.cost.DEFAULT_LINK` leads to something."""
    at = KDIST
    for part in dotted.split(".")[1:]:
        inside = MAPPED[part] if at == KDIST and part in MAPPED else at / part
        if inside.is_dir():
            at = inside
        elif inside.with_suffix(".py").is_file():
            at = inside.with_suffix(".py")
        else:
            return part in names_of(at / "__init__.py" if at.is_dir() else at)
    return True


def in_module(quoted: str) -> bool:
    """Whether a name such as `optimizer/local.needs_whole` is in that module."""
    path, _, name = quoted.rpartition("/")
    module, *names = name.split(".")
    file = next((at for at in (KDIST, CHECKOUT) if (at / path / f"{module}.py").is_file()), None)
    return file is not None and set(names) <= names_of(file / path / f"{module}.py")


def texts_of(path: Path) -> Iterator[str]:
    """The words of a page, or the docstrings and comments of a module, without code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return
    yield from re.findall(r"#.*$", text, re.MULTILINE)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def unknown_in(path: Path) -> list[str]:
    found = []
    for text in texts_of(path):
        for quoted in QUOTED.findall(text):
            first, _, rest = quoted.partition(".")
            if first == "kdist":
                known = in_kdist(quoted)
            elif "/" in quoted:
                known = not rest or bool(FILE.search(quoted)) or in_module(quoted)
            else:
                known = not rest or has(first, rest.split(".")[0])
            found += [] if known else [quoted]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    listed = [
        f"{file.removesuffix('.py')}.{name}"
        for file, names in LISTED.findall(text)
        for name in re.findall(r"\w+", names)
    ]
    assert unknown_in(path) + [one for one in listed if not in_module(one)] == []


def test_what_docstrings_name_exists():
    unknown = {str(path.relative_to(CHECKOUT)): unknown_in(path) for path in MODULES}
    assert {path: names for path, names in unknown.items() if names} == {}


@pytest.mark.parametrize(
    "quoted", ["kdist.fusion", "kdist.cluster.elsewhere.HandedOver", "kdist.comm.cost.NO_LINK"]
)
def test_a_path_that_leads_nowhere_is_found(quoted):
    assert not in_kdist(quoted)


def test_a_name_that_is_not_there_is_found():
    assert in_module("optimizer/local.needs_whole")
    assert not in_module("optimizer/local.needs_nothing")
    assert has("PlannedModel", "works") and has("StepResult", "slices")
    assert not has("PlacedModel", "works")
