"""Which checkpoints of a directory are whole, and which go."""

from kdist.checkpoint import directory as directories
from kdist.checkpoint.manifest import CheckpointError, DamagedError, Manifest

import pytest


def add(directory, step):
    folder = directories.new_folder(directory, step)
    directories.publish(folder, Manifest(step, {}))
    return folder


def names(directory):
    return [one.name for one in directories.folders(directory)]


def test_the_newest_is_last(tmp_path):
    for step in (3, 200_000_000, 20):
        add(tmp_path, step)
    assert names(tmp_path) == ["step-00000003", "step-00000020", "step-200000000"]
    assert directories.folders(tmp_path / "nowhere") == []


def test_what_was_not_finished_counts_for_nothing_and_goes(tmp_path):
    add(tmp_path, 1)
    begun = directories.new_folder(tmp_path, 2)
    (begun / "arrays").mkdir()
    assert names(tmp_path) == ["step-00000001"]
    add(tmp_path, 3)
    assert not begun.exists()


def test_a_step_that_is_there_stays_until_its_successor_is_whole(tmp_path):
    old = add(tmp_path, 5)
    new = directories.new_folder(tmp_path, 5)
    assert old != new
    assert names(tmp_path) == [old.name]
    directories.publish(new, Manifest(5, {}))
    assert names(tmp_path) == [old.name, new.name]
    assert directories.prune(tmp_path, None) == [old]


def test_the_newest_steps_stay_and_what_else_is_named(tmp_path):
    folders = [add(tmp_path, step) for step in (1, 2, 3, 4)]
    assert directories.prune(tmp_path, 2, [folders[0]]) == [folders[1]]
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "logs").mkdir()
    add(tmp_path, 1)
    directories.prune(tmp_path, 1)
    assert (tmp_path / "step-notes").exists()
    assert names(tmp_path) == ["step-00000001"]


def test_a_manifest_that_is_not_there_or_damaged(tmp_path):
    folder = add(tmp_path, 1)
    text = (folder / directories.MANIFEST).read_text()
    (folder / directories.MANIFEST).write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(DamagedError, match="step-00000001"):
        directories.load(folder)
    (folder / directories.MANIFEST).unlink()
    with pytest.raises(DamagedError, match="cannot be read"):
        directories.load(folder)


def test_a_folder_of_another_name_has_no_step(tmp_path):
    with pytest.raises(CheckpointError, match="step-00000120"):
        directories.step_of(tmp_path)


def test_further_files_are_checked(tmp_path):
    folder = directories.new_folder(tmp_path, 1)
    directories.write_file(folder / "state", b"123")
    manifest = Manifest(
        1, {}, files={"state": "a665a45920422f9d417e4867efdc4fb8a04a1f3fff1fa07e998e86f7f7a27ae3"}
    )
    assert directories.read_file(folder, manifest, "state") == b"123"
    (folder / "state").write_bytes(b"124")
    with pytest.raises(DamagedError, match="damaged"):
        directories.read_file(folder, manifest, "state")
