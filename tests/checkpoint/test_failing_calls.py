"""Each call that writes a checkpoint fails once, those of TensorStore's library too."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import failing_writer
from .failing_writer import KINDS
from .test_killed_writer import check

HALF = 0
"""Stands in place of an errno for a write of half of what was asked, which is no error."""
SOURCE = Path(__file__).with_name("failing_calls.c")
CHECKOUT = Path(__file__).resolve().parents[2]


class Writer:
    """A process that saves one step after the other.

    Args:
        directory: Of checkpoints.
        library: `failing_calls.c`, compiled.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        self.step = -1
        self._process = subprocess.Popen(
            [sys.executable, failing_writer.__file__, CHECKOUT, directory],
            env={**os.environ, "LD_PRELOAD": str(library), "FAILING_BELOW": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def save(self, kind: int = -1, number: int = 0, error: int = 0, later: bool = False) -> Any:
        """Whether the next step was written, how many calls failed, and all of them by kind."""
        self.step += 1
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(self.step, kind, number, error, int(later), file=process.stdin, flush=True)
        said, failed, *counts = process.stdout.readline().split()
        return said == "written", int(failed), list(map(int, counts))

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=20)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a compiler of C")
    library = tmp_path / "failing_calls.so"
    asked = [compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(asked, check=True, capture_output=True)
    (tmp_path / "checkpoints").mkdir()
    found = Writer(tmp_path / "checkpoints", library)
    yield found
    found.end()


def test_every_call_may_fail(tmp_path: Path, writer: Writer) -> None:
    """The last good checkpoint is there after each, and what failed is told."""
    writer.save()
    counts = writer.save()[2]
    made = dict(zip(KINDS, counts, strict=True))
    assert made["write"] >= 3 and made["fsync"] >= 6 and made["rename"] >= 2 and made["open"] >= 3
    for kind, name in enumerate(KINDS):
        errors = [(errno.EIO, False), (errno.ENOSPC, True)] + [(HALF, False)] * (name == "write")
        for error, later in errors:
            number = 0
            while True:
                before = check(tmp_path / "checkpoints")
                written, failed, _ = writer.save(kind, number, error, later)
                newest = check(tmp_path / "checkpoints")
                what = f"{name} {number} with {errno.errorcode.get(error)}, {later=}"
                assert newest in (before, writer.step), what
                assert not written or newest == writer.step, what
                # That a folder is there already is no error.
                harmless = failed == 0 or error == HALF or (name == "mkdir" and not later)
                assert not written or harmless, f"{what} is not told"
                if failed == 0:
                    assert written
                    break
                number += 1
                assert number < 100, "such calls are made without end"
            assert number == counts[kind] or name in ("mkdir", "remove"), what
