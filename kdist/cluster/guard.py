"""The guard of process 0: a small process beside it, for where it cannot speak for itself.

Calls of TensorFlow that keep Python's lock while they wait for another process (a function that is
handed over or forgotten, an array that is put on a device) wait for ever if that one is frozen, and
no thread of process 0 can say so. The guard then gives signs of life in its place, and at the
deadline tells all which process is silent, and ends process 0.

It runs as a file, with Python's own modules only: it is there at once, and small. It gets a line of
JSON each beat (seconds of silence, by process) while Python runs in process 0, and has the
connections of process 0: of what waits there unread it looks at the length alone.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SUSPECT_BEATS = 3
_END = 1


class Watch:
    """What the guard knows. No clock: only time counts in which the guard itself ran.

    Args:
        silence: Seconds without a sign of life after which a process has failed.
        beat: Seconds between two signs of life.
        grace: Seconds more, in which process 0 may say so itself.
        peers: Numbers of the other processes.
    """

    def __init__(self, silence: float, beat: float, grace: float, peers: list[int]) -> None:
        self._silence, self._beat, self._grace = silence, beat, grace
        self._silent = dict.fromkeys(peers, 0.0)
        self._stuck = 0.0

    def tick(self, silent: Mapping[int, float]) -> None:
        """Python runs in process 0, and has heard of the others so many seconds ago."""
        self._stuck = 0.0
        self._silent.update(silent)

    def passed(self, seconds: float, heard: set[int], stopped: bool) -> None:
        """Time has passed without a tick.

        Args:
            seconds: How much.
            heard: Processes of which something has arrived.
            stopped: Whether process 0 is: then it is the frozen one.
        """
        seconds = min(seconds, 2 * self._beat)
        self._stuck = 0.0 if stopped else self._stuck + seconds
        for process in self._silent:
            self._silent[process] = 0.0 if process in heard else self._silent[process] + seconds

    def speaks(self) -> bool:
        """Whether the guard gives signs of life: process 0 may be waiting for a frozen one.

        Where it keeps Python's lock for another reason, it looks frozen itself, as others do.
        """
        longest = max(self._silent.values(), default=0.0)
        return min(self._stuck, longest) > _SUSPECT_BEATS * self._beat

    def failed(self) -> int | None:
        """The process that has failed, where process 0 can no longer say so."""
        process = max(self._silent, key=lambda one: self._silent[one])
        late = self._silent[process] >= self._silence + self._grace
        return process if late and self._stuck >= self._grace else None


class Guard:
    """Watches over process 0, to its end.

    Args:
        settings: The first line that process 0 sends; see `guarded.Guarded`.
        lines: Where the next ones come from.
    """

    def __init__(self, settings: Mapping[str, Any], lines: int) -> None:
        peers = {int(process): given for process, given in settings["peers"].items()}
        self._texts = {process: str(text) for process, (_, text) in peers.items()}
        self._sockets = {process: socket.socket(fileno=one) for process, (one, _) in peers.items()}
        self._waiting = dict.fromkeys(peers, 0)
        self._program, self._beat = int(settings["program"]), float(settings["beat"])
        self._watch = Watch(settings["silence"], self._beat, settings["grace"], list(peers))
        self._lines, self._rest = lines, b""
        self._handle: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            self._handle = os.pidfd_open(self._program)

    def run(self) -> None:
        """Until process 0 has ended, or wants no guard any more."""
        files = [self._lines, *([] if self._handle is None else [self._handle])]
        last = time.monotonic()
        while os.getppid() == self._program:
            ready, _, _ = select.select(files, [], [], self._beat)
            if self._handle in ready:
                return
            now = time.monotonic()
            if ready:
                told = self._read()
                if told is None:
                    return
                self._watch.tick(told)
            else:
                self._watch.passed(now - last, self._heard(), self._stopped())
                if (process := self._watch.failed()) is not None:
                    self._end(self._texts[process])
                    return
                if self._watch.speaks():
                    self._tell(alive=True)
            last = now

    def _read(self) -> dict[int, float] | None:
        """What process 0 says; None at its end."""
        data = os.read(self._lines, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: dict[int, float] = {}
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:  # one that was cut, as this process did not read
                continue
            if said is None:
                return None
            found = {int(process): float(seconds) for process, seconds in said.items()}
        return found if data else None

    def _heard(self) -> set[int]:
        """Processes of which more lies unread than before."""
        found = set()
        for process, one in self._sockets.items():
            length = array.array("i", [0])
            with contextlib.suppress(OSError):
                fcntl.ioctl(one, termios.FIONREAD, length)
            if length[0] > self._waiting[process]:
                found.add(process)
            self._waiting[process] = length[0]
        return found

    def _stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self._program}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] in "Tt"

    def _tell(self, **message: Any) -> None:
        for one in self._sockets.values():
            with contextlib.suppress(OSError):  # a full connection is of one that does not read
                one.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)

    def _end(self, text: str) -> None:
        text += (
            " Process 0 waits for it in a call of TensorFlow that keeps Python's lock, and is ended"
            " by its guard."
        )
        with contextlib.suppress(OSError):
            print(f"kdist: {text}", file=sys.stderr, flush=True)
        self._tell(end=_END, text=text)
        with contextlib.suppress(ProcessLookupError):
            if self._handle is None:
                os.kill(self._program, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def main() -> None:
    """Guards the parent process, which says how through this one's input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with process 0
    first = b""
    while not first.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        first += byte
    Guard(json.loads(first), 0).run()


if __name__ == "__main__":
    main()
