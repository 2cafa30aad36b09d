"""A disk or a memory that is full in one process: the others end, and say where and why."""

import time
from pathlib import Path

import pytest

from .processes import program

SOON_SECONDS = 30
FULL_DISK = 'mount -t tmpfs -o size=64k none "$TEST_FOLDER" && exec "$@"'
FULL_LOG = 'exec "$@" >/dev/full 2>&1'

pytestmark = pytest.mark.wide


def test_files_of_process_0_cannot_grow(tmp_path: Path) -> None:
    small = {0: {"TEST_FILE_BYTES": "2000"}}
    with program("saves", 2, each=small, TEST_FOLDER=str(tmp_path)) as both:
        both[0].until("joined")
        assert [one.ends(SOON_SECONDS) for one in both] == [1, 1]
    for one in both:
        assert "CheckpointError: Cannot write arrays in" in one.text
        assert "File too large" in one.text
    assert "process 1 ends with process 0, which failed" in both[1].text


def test_a_full_disk_of_logs_stops_nobody() -> None:
    full = {1: ["sh", "-c", FULL_LOG, "sh"]}
    with program("ends", 2, before=full, TEST_CODE="0") as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text


def test_what_process_1_writes_finds_a_full_disk(tmp_path: Path) -> None:
    full = {1: ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL_DISK, "sh"]}
    given = {"TEST_DEVICES": "1", "TEST_MESH": "2", "TEST_FOLDER": str(tmp_path)}
    with program("writes_there", 2, before=full, TF_CPP_MIN_LOG_LEVEL="1", **given) as both:
        codes = [one.ends() for one in both]
        if "unshare failed" in both[1].text or "mount:" in both[1].text:
            pytest.skip("no mounts for users on this machine")
        assert codes == [1, 1]
    for one in both:
        assert one.text.count("heard of this from process 1 of 2 (127.0.0.1:") == 1
    assert "No space left on device" in both[1].text


def test_process_1_runs_out_of_memory(tmp_path: Path) -> None:
    little = {1: {"TEST_MORE_MEGABYTES": "300"}}
    given = {"TEST_DEVICES": "1", "TEST_FOLDER": str(tmp_path)}
    with program("large", 3, each=little, **given) as all_:
        all_[0].until("joined")
        started = time.monotonic()
        assert [all_[k].ends(2 * SOON_SECONDS) for k in (0, 2)] == [1, 1]
        assert time.monotonic() - started < SOON_SECONDS
    assert "trained" not in all_[0].text
    for survivor in (all_[0], all_[2]):
        assert "Process 1 of 3 (127.0.0.1:" in survivor.text or "process 1 of 3" in survivor.text
    assert "bad_alloc" in all_[1].text or "OOM" in all_[1].text


def test_what_is_wrong_with_data_is_said() -> None:
    """By the error of the operation that fails, not of one that waits for it in vain."""
    with program("mislabels", 2, TEST_DEVICES="2") as both:
        assert [one.ends() for one in both] == [1, 1], both[0].text[-3000:]
    assert both[0].text.count("SAID True") == 6, both[0].text[-3000:]
    assert "goes on [ True]" in both[0].text
    assert "process 0 alone has the script's functions" in both[0].text, "what is Python"


def test_process_1_ends_before_it_is_ready(tmp_path: Path) -> None:
    """Process 2, which comes a little later, hears of it too."""
    with program("ends_early", 3, TEST_FOLDER=str(tmp_path)) as all_:
        all_[2].until("serves")
        (tmp_path / "end").touch()
        assert [all_[k].ends() for k in (0, 2)] == [1, 1]
    for survivor in (all_[0], all_[2]):
        assert "Process 1 of 3 came, and ended before its TensorFlow server" in survivor.text
