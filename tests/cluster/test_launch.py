"""`python -m kdist.launch`: one command, one exit code, the first failure last."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kdist.launch.__main__ import command_of, parsed
from kdist.launch.run import heeded

import numpy as np
import pytest

from .processes import MEMBER, Process, program

COMMAND = [sys.executable, "-m", "kdist.launch", "--processes", "2", "--cpu-devices", "2"]


def launched(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {n: v for n, v in os.environ.items() if "XDIST" not in n} | variables
    return subprocess.run(
        [*COMMAND, *words], env=environment, capture_output=True, text=True, timeout=120
    )


def test_output_of_all_and_one_exit_code(tmp_path: Path) -> None:
    found = launched("--logs", str(tmp_path), str(MEMBER), "ends", TEST_CODE="3")
    assert found.returncode == 3
    assert re.search(r"^\[0\] joined$", found.stdout, re.MULTILINE)
    assert re.search(r"^\[1\] kdist: process 1 of 2 serves 127", found.stdout, re.MULTILINE)
    logs = sorted(path.name for path in (tmp_path / "start-0").iterdir())
    assert logs == ["process-0.log", "process-1.log"]
    assert "joined" in (tmp_path / "start-0" / "process-0.log").read_text()


def test_the_first_failure_stands_last(tmp_path: Path) -> None:
    found = launched("--logs", str(tmp_path), str(MEMBER), "raises")
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()
    assert "process 0 of 2 failed first (exit code 1); its output: " in last[-1]
    assert last[-2] == "KeyError: 'of the user'"
    assert "Traceback (most recent call last):" in last[-12:]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "--rate", "2"], ["train.py", "--rate", "2"]),
        (["train.py", "-m", "large"], ["train.py", "-m", "large"]),
        (["-m", "package.train", "-m", "large"], ["-m", "package.train", "-m", "large"]),
    ],
)
def test_arguments_of_the_script_stay_its_own(words: list[str], command: list[str]) -> None:
    given = parsed(["--processes", "2", *words])
    assert (command_of(given), given.processes) == ([sys.executable, *command], 2)


@pytest.mark.parametrize("words", [["--processes", "0"], ["--processes", "2", "--max-restarts=-1"]])
def test_numbers_that_mean_nothing_are_refused(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed([*words, "train.py"])
    assert stop.value.code == 2 and "Received: " in capsys.readouterr().err


def running(process: int) -> bool:
    """Whether it runs; one that has ended, and that nobody has asked for, does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


QUIET = """
import os, time
import kdist

print("ID", os.getpid(), flush=True)
kdist.init()
print("READY", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
def test_nobody_is_left_when_the_terminal_or_the_launcher_is_gone(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Of a script that prints nothing, and so would not hear that nobody reads it."""
    (tmp_path / "script.py").write_text(QUIET)
    environment = {n: v for n, v in os.environ.items() if "XDIST" not in n}
    words = ["--logs", str(tmp_path), str(tmp_path / "script.py")]
    # Tests in the background of a shell, or under `nohup`, would have it ignore some of them.
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGQUIT)}
    launcher = Process([*COMMAND, *words], environment)
    for ignored, handler in before.items():
        signal.signal(ignored, handler)
    ids: list[int] = []
    try:
        launcher.until("READY")
        ids = [int(line.split()[-1]) for line in launcher.lines if "] ID " in line]
        assert len(ids) == 2 and all(map(running, ids))
        launcher.process.send_signal(number)
        code = launcher.process.wait(30)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        end = time.monotonic() + 20
        while any(map(running, ids)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(running, ids))
    finally:
        launcher.process.kill()
        for one in filter(running, ids):
            os.kill(one, signal.SIGKILL)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in heeded()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in heeded()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.wide
def test_all_start_again_and_reach_the_loss_of_an_unbroken_run(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    found = launched(
        "--max-restarts",
        "1",
        "--logs",
        str(tmp_path / "logs"),
        str(MEMBER),
        "resumes",
        TEST_FOLDER=str(folder),
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "start 2 of 2" in found.stderr
    line = next(line for line in found.stdout.splitlines() if "RESULT " in line)
    again = json.loads(line.partition("RESULT ")[2])["loss"]
    with program("resumes", 2, TEST_FOLDER=str(tmp_path / "unbroken")) as both:
        assert both[0].ends() == 0, both[0].text[-2000:]
    line = next(line for line in both[0].lines if "RESULT " in line)
    unbroken = json.loads(line.partition("RESULT ")[2])["loss"]
    np.testing.assert_allclose(again[-1], unbroken[-1], rtol=0, atol=1e-12)
