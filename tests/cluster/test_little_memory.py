"""Four processes train a model that none of them could hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .processes import Process, program

WIDTH, LAYERS = 4096, 36
PARAMETERS = 4 * LAYERS * WIDTH * (WIDTH + 1)
SECONDS = 900.0
GIVEN = {
    "TEST_WIDTH": str(WIDTH),
    "TEST_LAYERS": str(LAYERS),
    "TEST_BYTES": str(PARAMETERS),
    "TEST_DEVICES": "1",
    "TEST_START": "120",
    "TEST_SILENCE": "120",
    # Memory that was freed is given back; otherwise glibc keeps it for the thread that had it.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_ARENA_MAX": "2",
    # With oneDNN TensorFlow keeps a pool of memory, which takes addresses by powers of two.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

SMALL_STACKS = ["sh", "-c", 'ulimit -s 1024 && exec "$@"', "sh"]
"""The limit counts what threads might need of their stacks, 8 MiB each."""

pytestmark = pytest.mark.long


def started(folder: Path, **more: str) -> Any:
    """Four processes of the scenario."""
    before = dict.fromkeys(range(4), SMALL_STACKS)
    return program("little_memory", 4, before=before, TEST_FOLDER=str(folder), **GIVEN, **more)


def losses(processes: list[Process]) -> list[float]:
    """Of the epochs of a run."""
    assert [one.ends(SECONDS) for one in processes] == [0] * 4, processes[0].text[-3000:]
    line = next(line for line in processes[0].lines if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_less_memory_than_parameters(tmp_path: Path) -> None:
    """Built, trained at level 3, saved, and resumed, where data may take no more than they do."""
    folder = tmp_path / "resumed"
    with started(tmp_path / "unbroken") as all_:
        unbroken = losses(all_)
    with started(folder, TEST_STOP="3") as all_:
        assert [one.ends(SECONDS) for one in all_] == [0] * 4, all_[0].text[-3000:]
    with started(folder) as all_:
        assert losses(all_) == unbroken
    assert "STEP 2" not in all_[0].lines and "STEP 3" in all_[0].lines


def test_a_whole_copy_is_too_much(tmp_path: Path) -> None:
    with started(tmp_path, TEST_WHOLE="1") as all_:
        assert all_[0].ends(SECONDS) != 0
    assert "STEP" not in all_[0].text
