"""Files that pages name are there, so that a newcomer finds them."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`([\w/]+\.py)\b", page.read_text(encoding="utf-8"))
    missing = [
        name
        for name in named
        if not (CHECKOUT / name).is_file()
        and not list((CHECKOUT / "kdist").glob(name if "/" in name else f"*/{name}"))
    ]
    assert missing == []
