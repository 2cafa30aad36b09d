"""A control group of the kernel that limits the memory of a process, where one can be made."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.swappiness"),
)
"""Folder, limit, and what is 0 so that nothing is swapped: of version 2, and of version 1."""


@contextlib.contextmanager
def memory_group() -> Iterator[Path | None]:
    """A group for one process, removed afterwards; None where it cannot be made."""
    for root, limit, _ in KINDS:
        folder = root / f"kdist-{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                yield folder
                return
        finally:
            folder.rmdir()
    yield None


def enter(folder: Path, limit: int) -> None:
    """Moves this process into a group: of what it takes from now on it may keep `limit` bytes.

    What it has already stays on the account of the group that it came from.
    """
    names = next(one for one in KINDS if (folder / one[1]).exists())
    (folder / names[1]).write_text(str(limit), encoding="ascii")
    with contextlib.suppress(OSError):  # without swap there may be no such setting
        (folder / names[2]).write_text("0", encoding="ascii")
    (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
