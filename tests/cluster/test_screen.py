"""Output of several processes on one screen: bars and questions show before their line ends."""

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from kdist.launch.screen import Screen, copy

import pytest

BAR = """
import sys, time

print("bar 1/2", end="\\r", flush=True)
time.sleep({seconds})
print("bar 2/2", end="\\r", flush=True)
print("sure? ", end="", flush=True)
time.sleep({seconds})
print("yes")
"""


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([(0, b"a\n"), (1, b"b\n"), (0, b"\n")], b"[0] a\n[1] b\n[0] \n"),
        ([(0, b"1/2\r"), (0, b"2/2\r"), (0, b"\n")], b"[0] 1/2\r[0] 2/2\r\n"),
        ([(0, b"1/2\r"), (1, b"b\n"), (0, b"2/2\n")], b"[0] 1/2\r\n[1] b\n[0] 2/2\n"),
        ([(0, b"a"), (0, b"b"), (0, b"c\n"), (0, b"d\n")], b"[0] abc\n[0] d\n"),
        ([(0, b"a"), (1, b"b\n"), (0, b"c\n")], b"[0] a\n[1] b\n[0] c\n"),
    ],
)
def test_lines_stay_whole(pieces: list[tuple[int, bytes]], shown: bytes) -> None:
    stream, plain = io.BytesIO(), io.BytesIO()
    numbered, screen = Screen(stream, True), Screen(plain, False)
    for process, piece in pieces:
        numbered.write(process, piece)
        screen.write(0, piece)
    assert stream.getvalue() == shown
    assert plain.getvalue() == b"".join(piece for _, piece in pieces)
    for _ in range(2):
        numbered.end_line()
    assert stream.getvalue() == shown


def test_what_is_copied_appears_in_time() -> None:
    stream, log = io.BytesIO(), io.BytesIO()
    screen = Screen(stream, True)
    end, into = os.pipe()
    with os.fdopen(end, "rb") as source:
        copying = threading.Thread(target=copy, args=(source, log, screen, 3))
        copying.start()

        def shows(data: bytes, shown: bytes) -> None:
            os.write(into, data)
            limit = time.monotonic() + 5
            while stream.getvalue() != shown and time.monotonic() < limit:
                time.sleep(0.01)
            assert stream.getvalue() == shown

        shows(b"1/2\r", b"[3] 1/2\r")
        shows(b"2/2\r\n", b"[3] 1/2\r[3] 2/2\r\n")
        shows(b"\xc3", b"[3] 1/2\r[3] 2/2\r\n[3] \xc3")
        shows(b"\xa4\nlast", b"[3] 1/2\r[3] 2/2\r\n[3] \xc3\xa4\n[3] last")
        os.write(into, b" word")
        os.close(into)
        copying.join()
    assert stream.getvalue().endswith(b"[3] last word")
    assert log.getvalue() == b"1/2\r2/2\r\n\xc3\xa4\nlast word"
    screen.end_line()
    assert stream.getvalue().endswith(b"[3] last word\n")


def test_dots_show_while_more_of_them_come() -> None:
    """A line whose process never pauses is not held for longer."""
    stream = io.BytesIO()
    end, into = os.pipe()
    with os.fdopen(end, "rb") as source:
        given = (source, io.BytesIO(), Screen(stream, True), 0)
        copying = threading.Thread(target=copy, args=given)
        copying.start()
        limit = time.monotonic() + 5
        while not stream.getvalue() and time.monotonic() < limit:
            os.write(into, b".")
            time.sleep(0.05)
        assert stream.getvalue().startswith(b"[0] .")
        os.close(into)
        copying.join()


def test_a_bar_shows_under_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BAR.format(seconds=1.5))
    command = [sys.executable, "-m", "kdist.launch", "--processes", "1", "--logs", str(tmp_path)]
    environment = {n: v for n, v in os.environ.items() if "XDIST" not in n}
    with subprocess.Popen(
        [*command, str(tmp_path / "script.py")], env=environment, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        shown, times = b"", []
        for wanted in (b"bar 1/2\r", b"bar 1/2\rbar 2/2\rsure? "):
            while len(shown) < len(wanted):
                assert (more := os.read(launcher.stdout.fileno(), len(wanted) - len(shown)))
                shown += more
            assert shown == wanted
            times.append(time.monotonic())
        assert launcher.stdout.read() == b"yes\n"
        times.append(time.monotonic())
    assert times[1] - times[0] > 0.7 and times[2] - times[1] > 0.7, "each before the script's pause"
    log = tmp_path / "start-0" / "process-0.log"
    assert log.read_bytes() == b"bar 1/2\rbar 2/2\rsure? yes\n"


@pytest.mark.parametrize("both", [False, True])
def test_a_run_goes_on_when_nobody_reads_its_output(both: bool, tmp_path: Path) -> None:
    """As under `| head`, or `2>&1 | head`: more is printed than a pipe holds."""
    lines = 30_000
    (tmp_path / "script.py").write_text(f"for i in range({lines}): print('line', i)")
    command = [sys.executable, "-m", "kdist.launch", "--processes", "1", "--logs", str(tmp_path)]
    with subprocess.Popen(
        [*command, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline()
        launcher.stdout.close()
        said = "" if launcher.stderr is None else launcher.stderr.read().decode()
        assert launcher.wait(60) == 0
    assert said.count("nobody reads its output any more") == 1 - both and "Traceback" not in said
    log = tmp_path / "start-0" / "process-0.log"
    assert log.read_bytes().endswith(b"line %d\n" % (lines - 1))
