"""Ctrl-C is the script's, in process 0: who sends it to all does not end the others."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import kdist
from kdist.checkpoint.manifest import STORE
from kdist.launch import run

import pytest
from rich.console import Console

from .processes import MEMBER, Process, program

SCRIPT = """
import time

print("READY", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep({seconds})
    print("saved", flush=True)
"""


@pytest.mark.wide
def test_who_signals_all_lets_the_script_save(tmp_path: Path) -> None:
    """As terminals, `srun` and `mpirun` do."""
    with program("interrupted", 3, TEST_FOLDER=str(tmp_path), TEST_MESH="6") as all_:
        all_[0].until("training")
        for one in (all_[1], all_[2], all_[0]):
            one.process.send_signal(signal.SIGINT)
        assert [one.ends(30) for one in all_] == [0, 0, 0], all_[0].text[-2000:]
    assert "saved 276" in all_[0].text
    for number, one in enumerate(all_[1:], 1):
        assert f"process {number} of 3 goes on until process 0 ends" in one.text
        assert "KeyboardInterrupt" not in one.text


@pytest.mark.wide
def test_a_scheduler_that_terminates_all_lets_the_script_save(tmp_path: Path) -> None:
    """Where the script has said before `kdist.init` what each process does then."""
    with program("terminated", 2, TEST_FOLDER=str(tmp_path)) as both:
        both[0].until("training")
        for one in (both[1], both[0]):
            one.process.send_signal(signal.SIGTERM)
        assert [one.ends(30) for one in both] == [0, 0], both[0].text[-2000:]
    assert "saved" in both[0].text
    newest = kdist.checkpoint.latest(tmp_path)
    assert newest is not None and (newest / f"{STORE}.1").exists(), "process 1 wrote its parts"


@pytest.mark.wide
def test_process_0_that_is_gone_ends_those_that_were_signalled() -> None:
    with program("goes_on", 2) as both:
        both[0].until("training")
        both[1].process.send_signal(signal.SIGINT)
        both[1].until("goes on until")
        both[0].process.kill()
        assert both[1].ends(30) == 1
    assert "ended without a word; process 1 of 2 ends too" in both[1].text


def test_a_script_that_is_interrupted_under_the_launcher_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdist.launch", "--processes", "2", "--cpu-devices", "2"]
    words = ["--logs", str(tmp_path / "logs"), str(MEMBER), "interrupted"]
    environment = {n: v for n, v in os.environ.items() if "XDIST" not in n}
    launcher = Process([*command, *words], environment | {"TEST_FOLDER": str(tmp_path)})
    try:
        launcher.until("training")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.ends(60) == 130
    finally:
        launcher.process.terminate()
    assert "[0] saved 276" in launcher.text
    assert "failed first" not in launcher.text and "Traceback" not in launcher.text


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's deadlines, for tests."""
    monkeypatch.setattr(run, "_LAST_SECONDS", 0.4)


def stopped(tmp_path: Path, script: str, *numbers: int) -> tuple[int, str, str, float]:
    """Launches a script in two processes, and signals the launcher when both are ready.

    Returns:
        Exit code, what the launcher says, what process 0 printed, seconds after the first signal.
    """
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py")]
    logs = [tmp_path / "start-0" / f"process-{k}.log" for k in range(2)]
    said = (tmp_path / "said").open("w+")
    since: list[float] = []

    def signals() -> None:
        while not all(one.exists() and "READY" in one.read_text() for one in logs):
            time.sleep(0.02)
        since.append(time.monotonic())
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=signals)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # one that comes late stops no test
    try:
        thread.start()
        code = run.Launch(command, 2, None, tmp_path, Console(file=said, width=200)).run()
        took = time.monotonic() - since[0]
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    said.seek(0)
    return code, said.read(), logs[0].read_text(), took


def test_the_launcher_waits_for_a_script_that_saves(tmp_path: Path, short: None) -> None:
    code, said, text, _ = stopped(tmp_path, SCRIPT.format(seconds=2), signal.SIGINT)
    assert (code, text) == (130, "READY\nsaved\n")
    assert "Ctrl-C again ends it at once" in said and "failed" not in said


def test_a_second_interrupt_ends_it_at_once(tmp_path: Path, short: None) -> None:
    twice = (signal.SIGINT, signal.SIGINT)
    code, said, text, took = stopped(tmp_path, SCRIPT.format(seconds=60), *twice)
    assert (code, text) == (130, "READY\n") and took < 10


def test_a_script_that_heeds_no_signal_is_killed(tmp_path: Path, short: None) -> None:
    ignoring = "import signal\nfor one in (2, 15):\n    signal.signal(one, signal.SIG_IGN)\n"
    twice = (signal.SIGINT, signal.SIGINT)
    code, said, text, took = stopped(tmp_path, ignoring + SCRIPT.format(seconds=0), *twice)
    assert (code, text) == (130, "READY\n") and took < 10
    assert "signal SIGKILL" in said


def test_an_interrupt_that_nobody_caught_is_said_in_one_line(tmp_path: Path, short: None) -> None:
    script = 'import time\nprint("READY", flush=True)\ntime.sleep(60)'
    code, said, text, _ = stopped(tmp_path, script, signal.SIGINT)
    assert code == 130 and "KeyboardInterrupt" in text
    assert "failed" not in said and "Traceback" not in said
    assert "kdist.launch: Ctrl-C ended the script; its output: " in said


def test_what_fails_after_an_interrupt_is_told(tmp_path: Path, short: None) -> None:
    script = SCRIPT.format(seconds=0).replace('"saved", flush=True', "1 / 0")
    code, said, *_ = stopped(tmp_path, script, signal.SIGINT)
    assert code == 130
    assert "ZeroDivisionError" in said and "failed first (exit code 1)" in said


def test_sigterm_ends_all_within_its_deadline(tmp_path: Path, short: None) -> None:
    code, said, text, took = stopped(tmp_path, SCRIPT.format(seconds=60), signal.SIGTERM)
    assert (code, text) == (143, "READY\n") and took < 10
    assert "failed first (signal SIGTERM)" in said
