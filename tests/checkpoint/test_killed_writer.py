"""A writer that is killed at any moment, and file systems that refuse at any call."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from kdist.checkpoint import directory as directories
from kdist.checkpoint import manifest, store, writer

import pytest

from . import without_tensorflow

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = Path(without_tensorflow.__file__)


def check(directory):
    """All whole checkpoints hold what was written; returns the newest step."""
    newest = -1
    for folder in directories.folders(directory):
        made = directories.load(folder)
        assert made.step == directories.step_of(folder)
        reader = store.Reader(folder)
        for array, values in zip(made.groups["model"], without_tensorflow.arrays_of(made.step)):
            assert (reader.read(array) == values).all()
        assert directories.read_file(folder, made, "state") == str(made.step).encode() * 1000
        newest = max(newest, made.step)
    return newest


@pytest.mark.parametrize("kills", [12, pytest.param(500, marks=pytest.mark.long)])
def test_a_kill_at_any_moment_leaves_the_last_good_one(tmp_path, kills):
    draw = random.Random(kills)
    said, span = -1, 0.04  # seconds that a write takes, on this machine, now
    for n in range(kills):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, CHECKOUT, tmp_path, str(said + 1), "2"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        first = ""
        if n % 4 == 0:  # so that there is progress, and it is known how long that takes
            begun = time.monotonic()
            first = process.stdout.readline()
            span = time.monotonic() - begun
        time.sleep(draw.random() * 2 * span)
        process.send_signal(signal.SIGKILL)
        lines = (first + process.stdout.read()).split()
        process.wait()
        said = max([said, *map(int, lines)])
        newest = check(tmp_path)
        assert newest >= said, "a checkpoint that was announced is gone"
        said = newest
    assert said > 0
    # A kill between the manifest and what it makes too old leaves one more; the next write clears.
    last = without_tensorflow.snapshot_of(manifest, writer, said + 1)
    writer.write(last, writer.Target(tmp_path, keep=2))
    assert len(directories.folders(tmp_path)) == 2


class Refused(OSError):
    """What the file system says."""


@pytest.mark.parametrize("call", ["fsync", "replace", "open", "rmtree"])
def test_a_call_that_fails_leaves_the_last_good_one(tmp_path, monkeypatch, call):
    target = writer.Target(tmp_path, keep=1)
    snapshot = without_tensorflow.snapshot_of
    writer.write(snapshot(manifest, writer, 1), target)
    where = {"rmtree": directories.shutil, "open": directories.os}.get(call, os)
    real = getattr(where, call)
    for number in range(20):
        left = [number]

        def failing(*args, left=left, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Refused(call)
            return real(*args, **kwargs)

        before = check(tmp_path)
        monkeypatch.setattr(where, call, failing)
        try:
            writer.write(snapshot(manifest, writer, before + 1), target)
            finished = True
        except Refused:
            finished = False
        monkeypatch.undo()
        assert check(tmp_path) >= before
        if finished and left[0] >= 0:
            break
    else:
        pytest.fail("the call is made without end")
    assert number > 0, "the call is never made"


def test_a_file_that_may_not_grow_leaves_the_last_good_one(tmp_path):
    """In a process of its own, for a limit of the system that holds for TensorStore too."""
    target = writer.Target(tmp_path, keep=2)
    writer.write(without_tensorflow.snapshot_of(manifest, writer, 1), target)
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import without_tensorflow as one
manifest, writer = one.modules({str(CHECKOUT)!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
target = writer.Target(__import__("pathlib").Path({str(tmp_path)!r}), 2)
for limit in (0, 100, 1000, 5000, 20000, 100000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        writer.write(one.snapshot_of(manifest, writer, 2), target)
        print("written")
    except (manifest.CheckpointError, OSError) as error:
        print("refused")
"""
    assert resource.RLIM_INFINITY == -1
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 6
    assert check(tmp_path) == 1


def _mounted(folder, size):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    )
    return done.returncode == 0


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _mounted(disk, "400k"):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        target = writer.Target(disk / "checkpoints", keep=None)
        with pytest.raises((manifest.CheckpointError, OSError), match="(?i)no space"):
            for step in range(10):
                writer.write(without_tensorflow.snapshot_of(manifest, writer, step), target)
        assert check(target.directory) >= 0
        for folder in directories.folders(target.directory):
            directories.remove(folder)
        writer.write(without_tensorflow.snapshot_of(manifest, writer, 99), target)
        assert check(target.directory) == 99
    finally:
        subprocess.run(["umount", disk], check=True)
