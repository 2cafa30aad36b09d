"""What long work is at: a line on a terminal, which goes when the work is done.

Each part of the work writes it once, and nothing refreshes it: a debugger's prompt, a child process
or a thread meets no second writer.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import keras

CLEAR = "\r\x1b[2K"
"""Takes away what the row of a terminal has."""


class _Line:
    """A line about one piece of work.

    Args:
        title: The work.
        terminal: Where it is written.
    """

    def __init__(self, title: str, terminal: Any) -> None:
        self._title, self._terminal = title, terminal
        self.say("")

    def say(self, part: str) -> None:
        """Writes which part of the work has begun; what others write next takes its place."""
        text = f"{self._title}: {part}" if part else self._title
        self._write(f"{CLEAR}{text[: shutil.get_terminal_size().columns - 1]}\r")

    def end(self) -> None:
        """Takes the line away."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        # Work that succeeds does not fail for a terminal that has gone.
        with contextlib.suppress(OSError, ValueError):
            self._terminal.write(text)
            self._terminal.flush()


# Of each thread its own.
_line: ContextVar[_Line | None] = ContextVar("line", default=None)
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def silenced(quiet: bool) -> Iterator[None]:
    """Meanwhile nothing is shown, if `quiet`."""
    token = _quiet.set(quiet or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(token)


@contextlib.contextmanager
def shown(title: str) -> Iterator[None]:
    """Shows the title of work, and what it is at, if standard output is a terminal.

    Work inside of other work is a part of that, and not shown by itself. Nothing is shown where
    Keras is not to print (`keras.config.disable_interactive_logging`).

    Args:
        title: What is being done, in ASCII.
    """
    if _line.get() is not None or _quiet.get() or not _is_terminal(sys.stdout):
        yield
        return
    line = _Line(title, sys.stdout)
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)
        line.end()


def at(part: str) -> None:
    """Says which part of the work that is shown has begun; nothing if none is."""
    if (line := _line.get()) is not None:
        line.say(part)


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is one; `sys.stdout` may be None, closed, or an object that only writes."""
    try:
        return keras.config.is_interactive_logging_enabled() and bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
