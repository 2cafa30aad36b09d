"""Starts processes of one program, reads what they print, and ends them by their own ids."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MEMBER = Path(__file__).with_name("member.py")
OTHERS = {
    "reads": "member_data.py",
    **dict.fromkeys(("sends", "routes", "on_wires"), "member_sent.py"),
    **dict.fromkeys(("lends", "follows", "terminated", "waits"), "member_settings.py"),
    **dict.fromkeys(("reads_again", "moves", "survives", "little_memory"), "member_kept.py"),
}
"""Files of the scenarios that are not in `member.py`."""
LIMIT_SECONDS = 90


class Process:
    """A process of a program.

    Attributes:
        lines: What it has printed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._arrived: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._arrived.put(line)
        self._arrived.put(None)

    @property
    def text(self) -> str:
        """What it has printed."""
        return "\n".join(self.lines)

    def until(self, text: str) -> None:
        """Waits for it to print a text."""
        end = time.monotonic() + LIMIT_SECONDS
        while (line := self._arrived.get(timeout=max(end - time.monotonic(), 0.01))) is not None:
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}:\n{self.text[-3000:]}")

    def ends(self, seconds: float = LIMIT_SECONDS) -> int:
        """Waits for its end; returns its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def program(
    scenario: str,
    count: int,
    *,
    only: Sequence[int] | None = None,
    each: Mapping[int, Mapping[str, str]] | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    before: Mapping[int, Sequence[str]] | None = None,
    **variables: str,
) -> Iterator[list[Process]]:
    """Runs a function of a file of members in several processes; kills those that are left.

    Args:
        scenario: Its name.
        count: Number of processes.
        only: Which of them start; all by default.
        each: Variables of single processes.
        port: Where process 0 waits.
        host: Where process 0 waits.
        before: What the commands of single processes begin with.
        **variables: Of all.
    """
    port = port or free_port()
    common = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    common |= {
        "KDIST_COORDINATOR": f"{host}:{port}",
        "KDIST_NUM_PROCESSES": str(count),
        "KDIST_TOKEN": "of the tests",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
    } | variables
    script = MEMBER.with_name(OTHERS.get(scenario, MEMBER.name))
    found = [
        Process(
            [*(before or {}).get(k, ()), sys.executable, str(script), scenario],
            common | {"KDIST_PROCESS_ID": str(k)} | dict((each or {}).get(k, {})),
        )
        for k in (range(count) if only is None else only)
    ]
    try:
        yield found
    finally:
        for one in found:
            one.process.kill()
            one.process.wait()
