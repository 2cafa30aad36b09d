"""What long work is at."""

from __future__ import annotations

import io
import threading
import types
from collections.abc import Iterator
from typing import Any

import kdist
from kdist.display import progress
from kdist.display.progress import CLEAR, at, shown, silenced

import keras
import numpy as np
import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Standard output, which keeps what is written."""
    found = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stdout=found))
    monkeypatch.setenv("COLUMNS", "80")
    before = keras.config.is_interactive_logging_enabled()
    keras.config.enable_interactive_logging()
    yield found
    if not before:
        keras.config.disable_interactive_logging()


def test_work_and_its_parts_are_shown_and_taken_away(terminal: Terminal) -> None:
    with shown("making a step"):
        with shown("a part"):
            at("tracing")
        at("running " + 80 * ".")
    lines = ["making a step", "making a step: tracing", f"making a step: running {56 * '.'}"]
    expected = "".join(f"{CLEAR}{line}\r" for line in lines) + CLEAR
    assert terminal.getvalue() == expected
    at("nothing is shown")
    assert terminal.getvalue() == expected


def test_work_that_fails_leaves_no_line(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), shown("dividing"):
        1 / 0  # noqa: B018
    with shown("again"):
        pass
    assert terminal.getvalue() == f"{CLEAR}dividing\r{CLEAR}{CLEAR}again\r{CLEAR}"


def test_nothing_is_shown_where_nothing_is_to_be_printed(terminal: Terminal) -> None:
    with silenced(True), silenced(False), shown("quiet"):
        at("work")
    keras.config.disable_interactive_logging()
    with shown("quiet"):
        at("work")
    keras.config.enable_interactive_logging()
    assert terminal.getvalue() == ""


def test_threads_do_not_meet(terminal: Terminal) -> None:
    with shown("mine"):
        other = threading.Thread(target=at, args=("theirs",))
        other.start()
        other.join()
    assert "theirs" not in terminal.getvalue()


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class Writes:
    """A logger in the place of a stream, as many write it."""

    def write(self, text: str) -> None:
        raise AssertionError(text)


@pytest.mark.parametrize("kind", ["none", "closed", "writes", "file", "gone"])
def test_any_standard_output_will_do(
    kind: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    streams: dict[str, Any] = {
        "none": None, "closed": closed, "writes": Writes(), "file": io.StringIO(), "gone": Gone()
    }  # fmt: skip
    monkeypatch.setenv("FORCE_COLOR", "1")  # which asks for what terminals get
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stdout=streams[kind]))
    with shown("work"):
        at("its end")
    if kind == "file":
        assert streams[kind].getvalue() == ""


@pytest.mark.parametrize("how", ["verbose", "quiet", "eager"])
def test_a_first_step_shows_what_it_is_at(how: str, terminal: Terminal) -> None:
    up, down = keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down")
    model = keras.Sequential([keras.Input((4,)), up, down])
    layouts = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=layouts)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse", run_eagerly=how == "eager")
    model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0 if how == "quiet" else 2)
    text = terminal.getvalue()
    if how != "verbose":
        assert "making" not in text
        return
    parts = ["", ": tracing layers", ": cutting a program over the mesh, by DTensor"]
    parts += [": the first run, which TensorFlow prepares"]
    found = [text.index(f"{CLEAR}making the train step{part}\r") for part in parts]
    assert found == sorted(found)
    assert progress._line.get() is None
