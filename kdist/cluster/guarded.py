"""Process 0's side of its guard: starts it, and tells it that Python runs here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kdist.cluster.output import say
from kdist.cluster.settings import Deadlines

_FILE = Path(__file__).with_name("guard.py")
_WITHOUT = (
    "process 0 goes on without, and cannot say so if another process freezes while TensorFlow "
    "waits for it with Python's lock"
)


class Guarded:
    """A guard, from now until `close` or the end of this process.

    Args:
        peers: By process: its connection's file, and what to say if it is silent.
        deadlines: When it is.
        grace: Seconds more, in which this process may say so itself.
        silences: Seconds since each was heard of; None where no guard is needed any more.
    """

    def __init__(
        self,
        peers: Mapping[int, tuple[int, str]],
        deadlines: Deadlines,
        grace: float,
        silences: Callable[[], Mapping[int, float] | None],
    ) -> None:
        self._silences, self._beat, self._owner = silences, deadlines.beat, os.getpid()
        self._closing = threading.Event()
        self._guard: subprocess.Popen[bytes] | None = None
        settings = {
            "program": os.getpid(),
            "silence": deadlines.silence,
            "beat": deadlines.beat,
            "grace": grace,
            "peers": peers,
        }
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_FILE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[file for file, _ in peers.values()],
                bufsize=0,
            )
            assert self._guard.stdin is not None
            line = json.dumps(settings).encode() + b"\n"
            while line:
                line = line[self._guard.stdin.write(line) :]
            os.set_blocking(self._guard.stdin.fileno(), False)
        except OSError as error:
            say(f"the guard of process 0 could not be started; {_WITHOUT}. Received: {error}")
            return
        threading.Thread(target=self._tick, daemon=True, name="kdist-guarded").start()

    def close(self) -> None:
        """Ends the guard."""
        self._closing.set()
        if self._guard is None or os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self._write(b"\nnull\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(self._beat)

    def _tick(self) -> None:
        try:
            while not self._closing.wait(self._beat / 2):
                silences = self._silences()
                if silences is None:
                    return
                self._write(json.dumps(silences).encode() + b"\n")
        except OSError as error:
            if not self._closing.is_set():
                say(f"the guard of process 0 has ended; {_WITHOUT}. Received: {error}")
        finally:
            self.close()  # a guard that hears nothing takes this process for one that waits

    def _write(self, data: bytes) -> None:
        """Sends a line, or none where the guard reads none: nobody waits for it."""
        assert self._guard is not None and self._guard.stdin is not None
        self._guard.stdin.write(data)
