"""Figures that docs show are those of a kept run."""

import functools
import json
import subprocess
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
    text = Path(results_tables.CHECKOUT / "docs/speed.md").read_text()
    changed = text.replace("| plain Keras, 1 device | 1.00 |", "| plain Keras, 1 device | 0.99 |")
    assert changed != text
    assert results_tables.with_results(changed) == text


@pytest.mark.parametrize("path", sorted(results_file.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_kept_runs_say_where_they_come_from(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["name"] == path.stem
    assert record["machine"]["cores"] >= 1
    assert record["date"] and record["commit"] and record["rows"]


@functools.cache
def whole_history() -> bool:
    """Whether this is a checkout with all of its history: no unpacked archive, no shallow clone."""
    command = ["git", "rev-parse", "--is-shallow-repository", "--show-toplevel"]
    try:
        done = subprocess.run(command, cwd=results_file.FOLDER, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return False
    answers = done.stdout.split()
    top = str(results_tables.CHECKOUT.resolve())
    return done.returncode == 0 and answers[0] == "false" and answers[1:] == [top]


def can_be_looked_up(record: dict) -> bool:
    """Whether the commit of a run is in this repository, or the record says that it is not."""
    commit = record["commit"].rstrip("+")
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    found = subprocess.run(command, cwd=results_file.FOLDER, capture_output=True).returncode == 0
    return found != ("commit_note" in record)


@pytest.mark.parametrize("path", sorted(results_file.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_the_commit_of_a_kept_run_is_here_or_is_said_to_be_missing(path: Path) -> None:
    if not whole_history():
        pytest.skip("Commits are looked up in a checkout with its whole history.")
    assert can_be_looked_up(json.loads(path.read_text()))


def test_what_keeps_one_from_having_a_commit_is_shown() -> None:
    shown = {
        "abc1234": {"commit": "abc1234"},
        "abc1234 (with files that differed from it)": {"commit": "abc1234+"},
        "abc1234 (with files that differed from it; lost)": {
            "commit": "abc1234+",
            "commit_note": "lost",
        },
    }
    for text, record in shown.items():
        assert results_tables.commit_of(record) == text
