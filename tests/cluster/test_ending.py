"""With which exit code a program ends, seen from inside."""

import subprocess
import sys
from pathlib import Path

import kdist

import pytest

ENDING = str(Path(kdist.__file__).parent / "cluster" / "ending.py")
WATCHED = """
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("ending", {path!r})
ending = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ending)
told = []
ending.Ending(lambda code, error: told or print(told.append(code) or code, repr(error))).watch()
"""
WAYS = {
    "to its end": ("pass", 0, None),
    "sys.exit": ("sys.exit(3)", 3, None),
    "sys.exit, a text": ("sys.exit('a text')", 1, None),
    "exit": ("exit(3)", 3, None),
    "quit": ("quit(3)", 3, None),
    "exit without a code": ("exit()", 0, None),
    "in a function": ("def main():\n    sys.exit(3)\nmain()", 3, None),
    "a caught exit": ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, None),
    "a caught exit, then another": (
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nsys.exit(4)",
        4,
        None,
    ),
    "a caught error": ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", 0, None),
    "an error": ("raise KeyError('x')", 1, "KeyError('x')"),
    "an error after a caught exit": (
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nraise KeyError('x')",
        1,
        "KeyError('x')",
    ),
    "an error, another hook": (
        "sys.excepthook = lambda *given: None\nraise KeyError('x')",
        1,
        "KeyError('x')",
    ),
    "an error inside try": (
        "try:\n    raise KeyError('x')\nfinally:\n    x = 1",
        1,
        "KeyError('x')",
    ),
    "the exit of a thread": (
        "import threading\none = threading.Thread(target=sys.exit, args=(3,))\n"
        "one.start()\none.join()",
        0,
        None,
    ),
    "the exit of a fork": (
        "import os\nif not (pid := os.fork()):\n    sys.exit(3)\nos.waitpid(pid, 0)",
        0,
        None,
    ),
    "an error in a fork": (
        "import os\nif not (pid := os.fork()):\n    1 / 0\nos.waitpid(pid, 0)\nsys.exit(4)",
        4,
        None,
    ),
}


def ended(script: str, *options: str) -> tuple[int, str]:
    text = WATCHED.format(path=ENDING) + script
    command = [sys.executable, *options, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("way", WAYS)
def test_the_code_is_that_which_the_parent_sees(way: str) -> None:
    script, code, error = WAYS[way]
    assert ended(script) == (code, f"{code} {error}")


def test_a_module_that_is_run_by_its_name(tmp_path: Path) -> None:
    text = WATCHED.format(path=ENDING)
    for end, code in (("", 0), ("sys.exit(3)", 3)):
        (tmp_path / "module.py").write_text(text + end)
        command = [sys.executable, "-m", "module"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (code, f"{code} None")


def test_an_interrupt_and_a_raised_exit() -> None:
    """Of SystemExit that is raised by hand, the status is seen by nobody inside."""
    assert ended("raise KeyboardInterrupt")[1] == "130 KeyboardInterrupt()"
    assert ended("raise SystemExit(3)") == (3, "0 None")


def test_without_site_there_is_no_exit() -> None:
    assert ended("sys.exit(3)", "-S") == (3, "3 None")
    assert ended("print(exit)")[1].startswith("Use exit() or Ctrl-D")


def test_an_error_is_explained_before_it_is_printed() -> None:
    """A process that has failed is named beside what TensorFlow says of it."""
    explained = "explain=lambda error: error.add_note('a reason')).watch()"
    text = WATCHED.format(path=ENDING).replace(").watch()", f", {explained}")
    command = [sys.executable, "-c", text + "raise KeyError('x')"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stderr.endswith("KeyError: 'x'\na reason\n")
