"""The processes of one program: started, read, and ended together."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kdist.cluster.signs import CALLED, LAUNCHER
from kdist.launch.screen import Screen, copy

from rich.console import Console

_TRACEBACK = "Traceback (most recent call last):"
_TOGETHER_SECONDS = 40.0
"""For the others to end by themselves, once one has failed: longer than `kdist.init` gives them."""
_LAST_SECONDS = 5.0
_ENDED_BY_INTERRUPT = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT)
_SETTLED_SECONDS = 0.3
_SHOWN_LINES = 60


def heeded() -> list[signal.Signals]:
    """The signals that end all processes: those have a session of their own, and hear of none."""
    # What `nohup` has the launcher ignore stays so.
    others = [n for n in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(n) != signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *others]


class Launch:
    """A script in several processes of this machine.

    Args:
        command: The script's, with its arguments.
        processes: How many.
        cpu_devices: Logical CPU devices of each; None leaves that to the script.
        logs: Directory that gets a file for each process.
        console: Gets what the launcher itself says.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        cpu_devices: int | None,
        logs: Path,
        console: Console,
    ) -> None:
        self.command = list(command)
        self.processes, self.cpu_devices = processes, cpu_devices
        self.logs, self.console = logs, console
        self._running: list[subprocess.Popen] = []
        self._first: int | None = None
        self._stops: list[int] = []

    def run(self, max_restarts: int = 0) -> int:
        """Runs to the end; all start again if one fails.

        Args:
            max_restarts: How often.

        Returns:
            The exit code: 0, or that of the process that failed first in the last attempt.
        """
        before = {s: signal.signal(s, lambda n, frame: self._stops.append(n)) for s in heeded()}
        try:
            for attempt in range(max_restarts + 1):
                code = self._attempt(attempt)
                if code == 0 or self._stops:
                    break
                if attempt < max_restarts:
                    self.console.print(f"kdist.launch: start {attempt + 2} of {max_restarts + 1}")
            return 128 + self._stops[-1] if self._stops else code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _attempt(self, attempt: int) -> int:
        folder = self.logs / f"start-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"process-{number}.log" for number in range(self.processes)]
        self._first = None
        screen = Screen(sys.stdout.buffer, numbered=self.processes > 1)
        with tempfile.TemporaryDirectory(prefix="kdist-launch-") as signs:
            sign = Path(signs, "called")
            common = self._variables(attempt) | {CALLED: str(sign)}
            self._running = [
                subprocess.Popen(
                    self.command,
                    env=common | {"KDIST_PROCESS_ID": str(number)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for number in range(self.processes)
            ]
            readers = [
                threading.Thread(target=self._read, args=(number, file, screen), daemon=True)
                for number, file in enumerate(files)
            ]
            for reader in readers:
                reader.start()
            self._wait()
            called = sign.exists()
        for reader in readers:
            reader.join(_LAST_SECONDS)
        screen.end_line()
        code = self._tell(files)
        if code == 0 and not self._stops and self.processes > 1 and not called:
            self.console.print(
                "kdist.launch: the script did not call kdist.init(), which makes one program of "
                f"its processes: it ran {self.processes} times, each by itself",
                soft_wrap=True,
            )
        return code

    def _variables(self, attempt: int) -> dict[str, str]:
        """The environment of all processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = os.environ | {
            "KDIST_COORDINATOR": f"127.0.0.1:{port}",
            "KDIST_NUM_PROCESSES": str(self.processes),
            "KDIST_TOKEN": secrets.token_hex(16),
            "KDIST_START": str(attempt),
            LAUNCHER: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        # TensorFlow's servers print their settings.
        common.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        if self.cpu_devices is not None:
            common["KDIST_CPU_DEVICES"] = str(self.cpu_devices)
        return common

    def _read(self, number: int, file: Path, screen: Screen) -> None:
        """Copies a process's output to its file, and to the screen."""
        stream = self._running[number].stdout
        assert stream is not None
        with file.open("wb") as log:
            copy(stream, log, screen, number)

    def _wait(self) -> None:
        """Until all have ended; when one fails, or all are to stop, the others have a while."""
        end = math.inf
        asked, heeded = False, 0
        while any(one.poll() is None for one in self._running):
            failed = [n for n, one in enumerate(self._running) if one.poll()]
            if failed and self._first is None:
                self._first = failed[0]
                if self._running[failed[0]].returncode > 0:
                    # The others may follow process 0 faster than it ends itself.
                    time.sleep(_SETTLED_SECONDS)
                    self._first = next(n for n, one in enumerate(self._running) if one.poll())
            if heeded < len(self._stops):
                heeded += 1
                if self._stop(heeded):
                    end = min(end, time.monotonic() + _LAST_SECONDS)
            if failed and end == math.inf:
                end = time.monotonic() + _TOGETHER_SECONDS
            if time.monotonic() > end:
                self._signal(signal.SIGKILL if asked else signal.SIGTERM)
                asked, end = True, time.monotonic() + _LAST_SECONDS
            time.sleep(0.05)
        if self._first is None:
            failed = [n for n, one in enumerate(self._running) if one.returncode]
            self._first = failed[0] if failed else None

    def _stop(self, times: int) -> bool:
        """Tells the processes of what the launcher was told; returns whether they are to hurry.

        Args:
            times: How often it was told to stop.
        """
        first = times == 1 and self._stops[0] == signal.SIGINT
        if first:
            self.console.print(
                "kdist.launch: the script hears of Ctrl-C, and has the time that it needs to save "
                "and end; Ctrl-C again ends it at once",
                soft_wrap=True,
            )
        self._signal(signal.SIGINT if first else signal.SIGTERM)
        return not first

    def _signal(self, number: int) -> None:
        """Signals the processes that still run, and what they started."""
        for one in self._running:
            if one.poll() is None:
                os.killpg(one.pid, number)

    def _tell(self, files: Sequence[Path]) -> int:
        """Says which process failed first, with what it printed last; returns the exit code."""
        if self._first is None:
            return 0
        code = self._running[self._first].returncode
        if signal.SIGINT in self._stops and code in _ENDED_BY_INTERRUPT:
            self.console.print(
                f"kdist.launch: Ctrl-C ended the script; its output: {files[0]}",
                markup=False,
                soft_wrap=True,
            )
            return 128 + signal.SIGINT
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        text = files[self._first].read_text(encoding="utf-8", errors="replace")
        lines = text[max(text.rfind(_TRACEBACK), 0) :].splitlines()[-_SHOWN_LINES:]
        self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        self.console.print(
            f"kdist.launch: process {self._first} of {self.processes} failed first ({how}); "
            f"its output: {files[self._first]}",
            markup=False,
            soft_wrap=True,
        )
        return code if code > 0 else 128 - code
