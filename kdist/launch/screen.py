"""What processes print, side by side on one screen: each line with the number of its process."""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
import time
from typing import IO, BinaryIO

_HELD_SECONDS = 0.4
"""For which a line waits for its end, so that no other process writes into it."""
_AT_ONCE = 1 << 16
_UNREAD = b"kdist.launch: nobody reads its output any more; the run goes on, see its logs\n"
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")


class Screen:
    """A stream that several processes write lines to, from threads.

    Where nobody reads it any more (`| head`), one line on stderr says so, and the run goes on.

    Args:
        stream: Where to.
        numbered: Whether lines begin with the number of their process.
    """

    def __init__(self, stream: BinaryIO, numbered: bool) -> None:
        self._stream, self._numbered = stream, numbered
        self._writing = threading.Lock()
        self._last: tuple[int, bytes] | None = None

    def write(self, process: int, piece: bytes) -> None:
        """Writes a line, also one that goes on later, or begins anew by a carriage return."""
        with self._writing:
            end = b"\n"
            if self._last is not None:
                end = self._last[1]
                if end != b"\n" and self._last[0] != process:
                    self._show(b"\n")
                    end = b"\n"
            begins = end == b"\n" or (end == b"\r" and piece != b"\n")
            if begins and self._numbered:
                piece = b"[%d] " % process + piece
            self._show(piece)
            self._last = process, piece[-1:]

    def end_line(self) -> None:
        """For what others write below."""
        with self._writing:
            if self._last is not None and self._last[1] != b"\n":
                self._show(b"\n")
                self._last = None

    def _show(self, piece: bytes) -> None:
        try:
            self._stream.write(piece)
            self._stream.flush()
        except BrokenPipeError:
            # What the launcher itself prints, and what is still to be flushed, has to go somewhere.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            try:
                os.write(sys.stderr.fileno(), _UNREAD)
            except BrokenPipeError:  # as under `2>&1 | head`
                os.dup2(self._stream.fileno(), sys.stderr.fileno())


def copy(source: IO[bytes], log: BinaryIO, screen: Screen, process: int) -> None:
    """Copies what a process prints, to its end: to its log as it is, to the screen by lines.

    Args:
        source: A pipe.
        log: Gets every byte at once.
        screen: Gets each line when it ends, or has waited for its end.
        process: Number of the process.
    """
    held, since = b"", 0.0
    with selectors.DefaultSelector() as arrivals:
        arrivals.register(source, selectors.EVENT_READ)
        while True:
            left = max(since + _HELD_SECONDS - time.monotonic(), 0) if held else None
            if arrivals.select(left):
                data = os.read(source.fileno(), _AT_ONCE)
                if not data:
                    break
                log.write(data)
                log.flush()
                since = since if held else time.monotonic()
                held += data
                end = 0
                for line in _LINE.finditer(held):
                    screen.write(process, line.group())
                    end = line.end()
                if end:
                    held, since = held[end:], time.monotonic()
            if held and time.monotonic() >= since + _HELD_SECONDS:
                screen.write(process, held)
                held = b""
    if held:
        screen.write(process, held)
