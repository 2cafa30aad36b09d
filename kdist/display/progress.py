"""What long work is at, and since when: a line on a terminal that goes when the work is done."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

AFTER = 2.0
"""Seconds that work takes before anything is shown: most is done by then."""


class _Line:
    """A line about one piece of work.

    Args:
        title: The work.
        console: Where it is shown.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        # TensorFlow's notices are filtered out of stderr, line by line: this is no line.
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(title)
        self._lock, self._started, self._ended = threading.Lock(), False, False
        self._timer = threading.Timer(AFTER, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        with self._lock:
            if not self._ended:
                self._started = True
                self._progress.start()

    def say(self, at: str) -> None:
        """Shows which part of the work has begun."""
        self._progress.update(self._task, description=f"{self._title}: {at}")

    def end(self) -> None:
        """Takes the line away."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._started:
                self._progress.stop()


_silent: list[None] = []
_line: _Line | None = None


@contextlib.contextmanager
def silenced(wanted: bool) -> Iterator[None]:
    """Meanwhile nothing is shown, if that is wanted."""
    if not wanted:
        yield
        return
    _silent.append(None)
    try:
        yield
    finally:
        _silent.pop()


@contextlib.contextmanager
def shown(title: str, console: Console | None = None) -> Iterator[None]:
    """Shows the title of work, what it is at, and for how long, on a terminal.

    Work inside of other work is a part of that, and not shown by itself.

    Args:
        title: What is being done.
        console: Where; by default the terminal of standard output, if it is one.
    """
    global _line
    console = console or _terminal()
    if _line is not None or _silent or console is None:
        yield
        return
    _line = line = _Line(title, console)
    try:
        yield
    finally:
        _line = None
        line.end()


def _terminal() -> Console | None:
    """Standard output if it can take a line back: no file, whatever the environment says of it."""
    console = Console()
    one = sys.stdout.isatty() and not console.is_dumb_terminal and not console.is_jupyter
    return console if one else None


def at(part: str) -> None:
    """Says which part of the work that is shown has begun; nothing if none is."""
    if _line is not None:
        _line.say(part)
