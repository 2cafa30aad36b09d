"""What processes print."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Prints a line for the user; a disk that is full of logs stops nobody."""
    with contextlib.suppress(OSError):
        print(f"kdist: {line}", file=sys.stderr, flush=True)


def described(error: BaseException) -> str:
    """An error in words, with its notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
