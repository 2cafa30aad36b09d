"""What long work is at."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import kdist
from kdist.display import progress

import keras
import numpy as np
import pytest
from rich.console import Console


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """One that keeps what is written; what is shown is shown at once."""
    monkeypatch.setattr(progress, "AFTER", 0.0)
    return Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})


def written(console: Console, wanted: str) -> str:
    """What was written, once it has some words, or after seconds."""
    for _ in range(500):
        if wanted in (text := console.file.getvalue()):
            break
        time.sleep(0.01)
    return text


def test_work_and_its_parts_are_shown_and_taken_away(terminal: Console) -> None:
    with progress.shown("making a step", terminal):
        assert "making a step" in written(terminal, "making a step")
        with progress.shown("a part", terminal):
            progress.at("tracing")
            assert "making a step: tracing" in written(terminal, "step: tracing")
        progress.at("running")
        written(terminal, "step: running")
    text = terminal.file.getvalue()
    assert "a part" not in text
    assert text.endswith("\x1b[2K")  # the line is empty again
    progress.at("nothing is shown")
    assert terminal.file.getvalue() == text


def test_short_work_shows_nothing(terminal: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 60.0)
    with progress.shown("short", terminal):
        progress.at("its end")
    assert terminal.file.getvalue() == ""


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some environments ask for what terminals get, colors for example."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert progress._terminal() is None


@pytest.mark.parametrize("verbose", [0, 2])
def test_a_first_step_shows_what_it_is_at(
    verbose: int, terminal: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_terminal", lambda: terminal)
    up, down = keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down")
    model = keras.Sequential([keras.Input((4,)), up, down])
    layouts = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=layouts)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    said: list[str] = []
    say = progress._Line.say

    def kept(self: Any, at: str) -> None:
        said.append(at)
        say(self, at)

    monkeypatch.setattr(progress._Line, "say", kept)
    model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=verbose)
    if not verbose:
        assert said == []
        assert terminal.file.getvalue() == ""
        return
    assert said[0] == "tracing layers"
    assert "by DTensor" in said[1]
    assert "first run" in said[-1]
    assert "making the train step" in terminal.file.getvalue()


def test_work_that_fails_leaves_no_line(terminal: Console) -> None:
    with pytest.raises(ZeroDivisionError), progress.shown("dividing", terminal):
        written(terminal, "dividing")
        1 / 0  # noqa: B018
    out = sys.stdout
    assert terminal.file.getvalue().endswith("\x1b[2K")
    with progress.shown("again", terminal):
        assert "again" in written(terminal, "again")
    assert sys.stdout is out
