"""Each process writes its own parts of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import kdist
from kdist.checkpoint import directory
from kdist.checkpoint.manifest import STORE

import keras
import numpy as np
import pytest

from .processes import Process, program

OTHER_FOLDER = 'mount -t tmpfs none "$TEST_FOLDER" && exec "$@"'


def elements_by_store(folder: Path) -> dict[str, int]:
    """Elements that a checkpoint's stores hold; no two parts of an array are of the same box."""
    found: dict[str, int] = {}
    for _, array in directory.load(folder).arrays:
        assert sum(math.prod(part.shape) for part in array.parts) == array.elements
        for part in array.parts:
            found[part.store] = found.get(part.store, 0) + math.prod(part.shape)
    return found


def run(processes: list[Process]) -> str:
    """What process 0 was told in all."""
    assert [one.ends() for one in processes] == [0] * len(processes), processes[0].text
    assert "equal True" in processes[0].text
    return next(line for line in processes[0].lines if line.startswith("told"))


def test_each_process_writes_its_own(tmp_path: Path) -> None:
    """Slots of Adam are cut at level 1: half of them are in process 1, and no weight is."""
    with program("shares", 2, TEST_FOLDER=str(tmp_path)) as both:
        assert "checkpoints" not in run(both)
    newest = directory.folders(tmp_path)
    assert [one.name for one in newest] == ["step-00000007", "step-00000008"]
    weights = 12 * 16 + 16 + 16 * 4 + 4
    found = elements_by_store(newest[-1])
    assert set(found) == {STORE, f"{STORE}.1"}
    assert found[f"{STORE}.1"] == pytest.approx(2 * weights / 2, abs=16)
    assert not list(tmp_path.glob(".mark*"))

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)]
    plain = keras.Sequential([keras.Input((12,)), *layers])
    plain.compile("adam", "mse")
    before = plain.get_weights()
    assert kdist.checkpoint.restore(plain, tmp_path).step == 8
    assert not any(map(np.array_equal, before[::2], plain.get_weights()[::2]))


@pytest.mark.wide
def test_each_process_writes_its_own_codes(tmp_path: Path) -> None:
    """16-bit moments as they lie there."""
    with program("shares", 2, TEST_FOLDER=str(tmp_path), TEST_CODED="1") as both:
        run(both)
    arrays = directory.load(directory.folders(tmp_path)[-1]).groups["optimizer"]
    moments = [one for one in arrays if one.path.endswith(("_momentum", "_velocity"))]
    assert {one.codes for one in moments} == {"1-6-9/39", "0-6-10/47"}
    assert {part.store for one in moments for part in one.parts} == {STORE, f"{STORE}.1"}


@pytest.mark.wide
def test_a_dataset_that_processes_read_goes_on_within_an_epoch(tmp_path: Path) -> None:
    """It is read once more, and passed over, which a line says."""
    with program("reads_again", 2, TEST_FOLDER=str(tmp_path)) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text
        found = next(line for line in both[0].lines if line.startswith("RESULT "))
    result = json.loads(found.removeprefix("RESULT "))
    assert result["equal"], both[0].text
    assert result["step"] % 3 == 0 < result["step"]


@pytest.mark.wide
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_other_processes_go_on_within_an_epoch(before: int, after: int, tmp_path: Path) -> None:
    """Of one process the iterator's state is saved, which those of several cannot take."""
    text, found = "", []
    for count, variables in (
        (before, {"TEST_FOLDER": f"{tmp_path}/moved", "TEST_STOP": "7"}),
        (after, {"TEST_FOLDER": f"{tmp_path}/moved"}),
        (after, {"TEST_FOLDER": f"{tmp_path}/whole"}),
    ):
        with program("moves", count, TEST_DEVICES=str(4 // count), **variables) as all_:
            assert [one.ends() for one in all_] == [0] * count, all_[0].text[-3000:]
            text, line = all_[0].text, next(o for o in all_[0].lines if o.startswith("RESULT "))
        found.append(json.loads(line.removeprefix("RESULT ")))
    _, moved, whole = found
    for name in ("epochs", "steps"):
        assert moved[name]["step"] == 6 and whole[name]["step"] is None, text
        np.testing.assert_allclose(moved[name]["loss"], whole[name]["loss"], rtol=0, atol=1e-12)


@pytest.mark.wide
def test_a_folder_that_is_not_shared_is_written_by_process_0(tmp_path: Path) -> None:
    apart = {1: ["unshare", "--map-root-user", "--mount", "sh", "-c", OTHER_FOLDER, "sh"]}
    with program("shares", 2, before=apart, TEST_FOLDER=str(tmp_path)) as both:
        told = "".join(one.text for one in both)
        codes = [one.ends() for one in both]
        told = "".join(one.text for one in both)
        if "unshare failed" in told or "mount:" in told:
            pytest.skip("no mounts for users on this machine")
        assert codes == [0, 0]
        assert told.count("Process 1 of 2 cannot write to the directory of checkpoints") == 1
    assert set(elements_by_store(directory.folders(tmp_path)[-1])) == {STORE}


@pytest.mark.wide
def test_files_of_process_1_cannot_grow(tmp_path: Path) -> None:
    small = {1: {"TEST_FILE_BYTES": "2000"}}
    with program("saves", 2, each=small, TEST_FOLDER=str(tmp_path)) as both:
        both[0].until("joined")
        assert [one.ends() for one in both] == [1, 1]
    for one in both:
        assert "CheckpointError: Process 1: Cannot write arrays in" in one.text
        assert "File too large" in one.text
    assert not directory.folders(tmp_path)
