"""The Python blocks of pages run, in order, in one namespace, as a reader would type them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RUN = (
    "optimizer_parallelism",
    "batch_semantics",
    "checkpoints",
    "choosing",
    "compression",
    "custom_loops",
    "debugging",
    "export",
    "gpus",
    "pipeline",
    "recompute",
    "tensor_parallelism",
)
"""Pages whose blocks are a whole program; those of others are parts of one."""
PAGES = [README, *(ROOT / "docs" / f"{name}.md" for name in RUN)]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """Returns each block with the line of the page where its code starts."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path):
    # A fresh process: the first block starts kdist, before TensorFlow starts. Blank lines keep
    # the page's line numbers, so an error names the line to fix.
    program, line = "", 1
    for start, code in blocks(page):
        program += "\n" * (start - line) + code
        line = start + code.count("\n")
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program)
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_there_is_something_to_run():
    assert len(blocks(README)) >= 3


LINK = re.compile(r"\]\(([^)#:]+)\)")
PAGES_AND_LINKS = sorted(
    (page, target)
    for page in [README, *(ROOT / "docs").rglob("*.md")]
    for target in set(LINK.findall(page.read_text()))
)


@pytest.mark.parametrize(("page", "target"), PAGES_AND_LINKS, ids=lambda value: str(value)[-40:])
def test_links_lead_to_files(page, target):
    assert (page.parent / target).exists()


PLACES = sorted(
    (page, target)
    for page in [README, *(ROOT / "docs").rglob("*.md")]
    for target in set(re.findall(r"\]\(([^):]*#[^)]+)\)", page.read_text()))
)


def places(page):
    """What a page's headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize(("page", "target"), PLACES, ids=lambda value: str(value)[-40:])
def test_links_lead_to_headings(page, target):
    name, place = target.split("#")
    assert place in places(page.parent / name if name else page)
