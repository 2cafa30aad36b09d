"""The README's Python blocks run, in order, in one namespace, as a reader would type them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[int, str]]:
    """Returns each block with the line of the README where its code starts."""
    text = README.read_text()
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]


def test_python_blocks_run(tmp_path):
    # A fresh process: the first block starts kdist, before TensorFlow starts. Blank lines keep
    # the README's line numbers, so an error names the line to fix.
    program, line = "", 1
    for start, code in blocks():
        program += "\n" * (start - line) + code
        line = start + code.count("\n")
    script = tmp_path / "README.py"
    script.write_text(program)
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_there_is_something_to_run():
    assert len(blocks()) >= 3


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README.read_text()))))
def test_links_lead_to_files(target):
    assert (README.parent / target).exists()
