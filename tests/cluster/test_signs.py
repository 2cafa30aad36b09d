"""What tells the launcher, and children of a process, of its `kdist.init`."""

import os
import re
import sys
from pathlib import Path

from kdist.cluster import signs
from kdist.cluster.joining import init
from kdist.cluster.place import Place
from kdist.cluster.variables import KDIST

import pytest
import tensorflow as tf

from .test_launch import launched

PLACE = Place(0, 2, "127.0.0.1:1", "KDIST_*")
CHILDREN = """
import multiprocessing
import os
import subprocess
import sys

import kdist

kdist.init()

if __name__ == "__main__":
    spawned = multiprocessing.get_context("spawn").Process(target=print, args=("never",))
    spawned.start()
    spawned.join()
    child = [sys.executable, "-c", "import kdist; kdist.init(); print('alone')"]
    free = {n: v for n, v in os.environ.items() if not n.startswith("KDIST_")}
    codes = [subprocess.run(child, env=one).returncode for one in (None, free)]
    print("codes", spawned.exitcode, *codes, flush=True)
"""


@pytest.mark.wide
def test_children_that_find_their_parents_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    done = launched("--logs", str(tmp_path), str(tmp_path / "script.py"))
    assert done.returncode == 0 and "kdist.launch" not in done.stderr, done.stderr[-2000:]
    assert "[0] codes 1 1 0\n" in done.stdout and "[0] alone\n" in done.stdout
    assert "never" not in done.stdout and "Is process 0 there twice" not in done.stdout
    refused = re.findall(r"RuntimeError: (.*)\n", done.stdout)
    assert len(refused) == 2
    assert 'put kdist.init() under `if __name__ == "__main__":`' in refused[0]
    assert "Start it without the variables of KDIST_*" in refused[1]


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signs.JOINED, raising=False)
    signs.check(PLACE)
    monkeypatch.setenv(signs.JOINED, "")  # taken back after the test
    signs.joined(PLACE)
    signs.check(PLACE)  # in the process itself
    value = os.environ[signs.JOINED].replace(str(os.getpid()), str(os.getppid()))
    monkeypatch.setenv(signs.JOINED, value)
    for other in (Place(1, 2, "127.0.0.1:1", "KDIST_*"), Place(0, 2, "127.0.0.1:2", "KDIST_*")):
        signs.check(other)
    with pytest.raises(RuntimeError, match="Received: process 0 of 2 at 127.0.0.1:1, from KDIST"):
        signs.check(PLACE)


def test_a_place_by_arguments_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tf.zeros([]).shape == (), "which refuses later, where this one does not"
    monkeypatch.setenv(signs.JOINED, f"{os.getppid()} process 0 of 2 at 127.0.0.1:1")
    with pytest.raises(ValueError, match="A process joins the others before TensorFlow starts"):
        init(coordinator="127.0.0.1:1", num_processes=2, process_id=0)
    for name, value in zip(KDIST, ("127.0.0.1:1", "2", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="has joined"):
        init()


def test_a_child_of_multiprocessing_is_told_of_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signs.JOINED, f"{os.getppid()} process 0 of 2 at 127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules[__name__])
    with pytest.raises(RuntimeError, match='under `if __name__ == "__main__":`'):
        signs.check(PLACE)


def test_processes_that_run_apart_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('hello')")
    words = ("--logs", str(tmp_path), str(tmp_path / "script.py"))
    done = launched(*words)
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "kdist.launch" in line]
    assert len(told) == 1 and "did not call kdist.init()" in told[0] and "2 times" in told[0]
    assert "kdist.launch" not in launched("--processes", "1", *words).stderr


def test_init_leaves_a_sign_where_the_launcher_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process stays alone, as scripts with `kdist.comm.connect` do."""
    monkeypatch.setenv(signs.CALLED, str(tmp_path / "called"))
    init(num_processes=1)
    assert (tmp_path / "called").exists()
    monkeypatch.setenv(signs.CALLED, str(tmp_path / "nowhere" / "called"))
    init(num_processes=1)
