"""The guard of process 0 speaks where that one cannot, and never longer than it lives."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kdist.cluster import guard
from kdist.cluster.guard import Watch
from kdist.cluster.guarded import Guarded
from kdist.cluster.settings import Deadlines

import pytest

from .processes import program

PROGRAM = """
import json, os, socket, subprocess, sys, time

file, port, ticks = sys.argv[1:]
peers = {one: socket.create_connection(("127.0.0.1", int(port))) for one in (1, 2)}
for one, connection in peers.items():
    connection.sendall(b"%d" % one)
given = {one: (c.fileno(), f"Process {one} is silent.") for one, c in peers.items()}
settings = {"program": os.getpid(), "silence": 1, "beat": 0.1, "grace": 0.5, "peers": given}
numbers = [number for number, _ in given.values()]
child = subprocess.Popen([sys.executable, "-I", "-S", file], stdin=-1, pass_fds=numbers, bufsize=0)
child.stdin.write(json.dumps(settings).encode() + b"\\n")
print(child.pid, flush=True)
while True:
    time.sleep(0.05)
    if ticks == "heard":
        child.stdin.write(b'{"1": 0, "2": 0}\\n')
    if ticks == "silent":  # process 0 knows, and does what it does
        child.stdin.write(b'{"1": 9, "2": 0}\\n')
    if ticks == "ends":
        child.stdin.write(b'{"1": \\nnull\\n')
        child.wait()
        time.sleep(60)
"""


def watch() -> Watch:
    return Watch(silence=20, beat=1, grace=5, peers=[1, 2])


def seconds_until_failed(one: Watch, heard: set[int], most: int = 100) -> int | None:
    for second in range(1, most):
        one.passed(1, heard, stopped=False)
        if one.failed() is not None:
            return second
    return None


def test_a_silent_process_is_found_after_the_deadline_and_the_grace() -> None:
    one = watch()
    one.tick({1: 0.5, 2: 0.5})
    for _ in range(3):
        one.passed(1, {2}, stopped=False)
        assert not one.speaks()
    one.passed(1, {2}, stopped=False)
    assert one.speaks()
    assert seconds_until_failed(one, {2}) == 25 - 4 and one.failed() == 1
    one.tick({1: 30})
    assert one.failed() is None and not one.speaks(), "process 0 can say so itself"
    assert seconds_until_failed(one, {2}) == 5, "no less than the grace without a tick"


def test_where_none_is_silent_process_0_looks_frozen_itself() -> None:
    one = watch()
    assert seconds_until_failed(one, {1, 2}) is None and not one.speaks()


def test_a_stopped_process_0_is_the_one_that_is_frozen() -> None:
    one = watch()
    for _ in range(100):
        one.passed(1, set(), stopped=True)
        assert one.failed() is None and not one.speaks()


def test_time_in_which_the_guard_did_not_run_does_not_count() -> None:
    one = watch()
    one.passed(1000, set(), stopped=False)
    assert one.failed() is None and not one.speaks()


@contextlib.contextmanager
def guarded(ticks: str) -> Iterator[tuple[subprocess.Popen, int, dict[int, socket.socket]]]:
    """A program with a guard, the guard's id, and the other ends of its connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", PROGRAM, guard.__file__, port, ticks]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as made:
            try:
                found = [server.accept()[0] for _ in range(2)]
                assert made.stdout is not None
                yield made, int(made.stdout.readline()), {int(one.recv(1)): one for one in found}
            finally:
                made.kill()
                for one in found:
                    one.close()


def read(one: socket.socket, seconds: float, beats: socket.socket | None = None) -> bytes | None:
    """What arrives, to the end; None if it does not end in time. Gives signs of life meanwhile."""
    data, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if beats is not None:
            with contextlib.suppress(OSError):
                beats.send(b"alive\n")
        if select.select([one], [], [], 0.05)[0]:
            try:
                new = one.recv(1 << 16)
            except ConnectionResetError:
                return data
            if not new:
                return data
            data += new
    return None if not data else data + b"..."


def is_there(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody asked


def is_gone(process: int) -> bool:
    end = time.monotonic() + 2
    while is_there(process) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_there(process)


def test_the_guard_speaks_for_a_program_that_cannot_and_ends_it() -> None:
    with guarded("none") as (made, guards, peers):
        data = read(peers[2], 20, beats=peers[2])
        assert data is not None and made.wait(5) == -signal.SIGKILL
        *alive, last = [json.loads(line) for line in data.splitlines()]
        assert alive and all(one == {"alive": True} for one in alive)
        assert last["end"] == 1 and last["text"].startswith("Process 1 is silent.")
        assert made.stdout is not None and f"kdist: {last['text']}" in made.stdout.read()
        assert is_gone(guards)


@pytest.mark.parametrize("ticks", ["heard", "silent", "ends"])
def test_the_guard_is_silent_where_python_runs(ticks: str) -> None:
    with guarded(ticks) as (made, guards, peers):
        assert read(peers[2], 2.5, beats=peers[2]) is None and made.poll() is None
        assert is_gone(guards) if ticks == "ends" else is_there(guards)


def test_the_guard_is_silent_for_a_stopped_program() -> None:
    with guarded("none") as (made, _, peers):
        os.kill(made.pid, signal.SIGSTOP)
        assert read(peers[2], 2.5, beats=peers[2]) is None and made.poll() is None


def test_the_guard_ends_with_a_program_that_is_killed() -> None:
    with guarded("heard") as (made, guards, peers):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            time.sleep(0.2)
            os.kill(guards, number)
        time.sleep(0.2)
        assert is_there(guards), "it ends with the program"
        made.kill()
        assert read(peers[1], 1) == b"" and read(peers[2], 1) == b""
        assert is_gone(guards)


def test_a_guard_that_cannot_be_started_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    Guarded({}, Deadlines(), 5.0, dict).close()
    said = capfd.readouterr().err
    assert "the guard of process 0 could not be started" in said and "/nowhere/python" in said


def test_a_guard_that_has_ended_is_told_of(capfd: pytest.CaptureFixture) -> None:
    made = Guarded({}, Deadlines(silence=1), 5.0, lambda: {1: 0.0})
    os.kill(guard_of(os.getpid()), signal.SIGKILL)
    end = time.monotonic() + 5
    said = ""
    while "has ended" not in said and time.monotonic() < end:
        time.sleep(0.05)
        said += capfd.readouterr().err
    assert "the guard of process 0 has ended; process 0 goes on without" in said
    made.close()


def test_a_guard_that_is_closed_ends_without_a_word(capfd: pytest.CaptureFixture) -> None:
    made = Guarded({}, Deadlines(silence=1), 5.0, lambda: {1: 0.0})
    guards = guard_of(os.getpid())
    time.sleep(0.5)
    made.close()
    assert is_gone(guards) and "guard" not in capfd.readouterr().err


SOON_SECONDS = 30
"""Within which every survivor has ended."""


def guard_of(process: int) -> int:
    """The id of the guard among a process's children."""
    for one in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = one.read_text().rpartition(")")[2].split()[1]
            if int(parent) == process and b"guard.py" in (one.parent / "cmdline").read_bytes():
                return int(one.parent.name)
    raise AssertionError("no guard")


@pytest.mark.wide
@pytest.mark.parametrize("what", ["traces", "forgets", "puts"])
def test_one_freezes_while_tensorflow_waits_for_it_with_pythons_lock(
    what: str, tmp_path: Path
) -> None:
    variables = {"TEST_SILENCE": "4", "TEST_DEVICES": "1", "TEST_FOLDER": str(tmp_path)}
    with program("waits", 3, TEST_WHAT=what, **variables) as all_:
        all_[0].until("frozen")
        assert all_[0].ends(SOON_SECONDS) == -signal.SIGKILL
        assert all_[2].ends(SOON_SECONDS) == 1
    assert "went on" not in all_[0].text
    for survivor in (all_[0], all_[2]):
        assert "Process 1 of 3" in survivor.text and "no sign of life for 4 s" in survivor.text
        assert "is ended by its guard" in survivor.text


@pytest.mark.wide
def test_one_that_goes_on_in_time_was_not_frozen(tmp_path: Path) -> None:
    variables = {"TEST_SILENCE": "4", "TEST_DEVICES": "1", "TEST_FOLDER": str(tmp_path)}
    with program("waits", 3, TEST_WHAT="traces", **variables) as all_:
        all_[0].until("frozen")
        time.sleep(3)
        all_[1].process.send_signal(signal.SIGCONT)
        assert [one.ends() for one in all_] == [0, 0, 0], all_[0].text[-2000:]
    assert "went on" in all_[0].text


@pytest.mark.wide
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_no_guard_is_left(how: str, tmp_path: Path) -> None:
    """By SIGINT the program ends in order."""
    with program("interrupted", 2, TEST_FOLDER=str(tmp_path)) as both:
        both[0].until("training")
        guards = guard_of(both[0].process.pid)
        both[0].process.send_signal(getattr(signal, how))
        code = both[0].ends(SOON_SECONDS)
        assert is_gone(guards)
        assert code == (0 if how == "SIGINT" else -getattr(signal, how))
        assert both[1].ends(SOON_SECONDS) == (0 if how == "SIGINT" else 1)
