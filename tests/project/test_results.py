"""Figures that README and docs show are those of a kept run."""

import json
from pathlib import Path

import pytest
import results_file
import results_tables


@pytest.mark.parametrize("page", results_tables.PAGES)
def test_tables_are_those_of_the_kept_runs(page: str) -> None:
    text = Path(results_tables.CHECKOUT / page).read_text()
    places = results_tables.PLACE.findall(text)
    assert places, f"{page} shows no results: take it out of PAGES"
    assert results_tables.with_results(text) == text


def test_another_figure_would_show() -> None:
    text = Path(results_tables.CHECKOUT / "README.md").read_text()
    changed = text.replace("| plain Keras, 1 device | 1.00 |", "| plain Keras, 1 device | 0.99 |")
    assert changed != text
    assert results_tables.with_results(changed) == text


@pytest.mark.parametrize("path", sorted(results_file.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_kept_runs_say_where_they_come_from(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["name"] == path.stem
    assert record["machine"]["cores"] >= 1
    assert record["date"] and record["commit"] and record["rows"]
