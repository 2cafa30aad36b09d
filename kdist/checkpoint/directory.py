"""A directory of checkpoints: which are whole, which is the newest, and which may go.

A checkpoint is a folder `step-00000120`. It is there once its `manifest.json` is: that file is
written last, beside its place, and moved there in one operation of the file system. So a process
that dies at any moment leaves whole checkpoints, and perhaps a folder without a manifest, which
counts for nothing and is cleared away by the next save.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from kdist.checkpoint.manifest import CheckpointError, DamagedError, Manifest

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def folders(directory: Path) -> list[Path]:
    """The whole checkpoints of a directory, oldest first."""
    return [one for one in _all(directory) if (one / MANIFEST).exists()]


def step_of(folder: Path) -> int:
    """The training steps that a checkpoint's name says."""
    return _order(folder)[0]


def _order(folder: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(folder.name)
    if found is None:
        raise CheckpointError(
            f"A checkpoint's folder is called step-00000120, or alike. Received: {folder}"
        )
    return int(found[1]), int(found[2] or 0)


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [one for one in directory.iterdir() if _NAME.fullmatch(one.name) and one.is_dir()]
    return sorted(found, key=_order)


def new_folder(directory: Path, step: int) -> Path:
    """Makes the folder of a new checkpoint; clears away what was begun and never finished.

    A step that is there already gets another folder, `step-00000120.1`: the old one stays until
    the new one is whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for one in _all(directory):
        if not (one / MANIFEST).exists():
            shutil.rmtree(one)
    same = [_order(one)[1] for one in _all(directory) if step_of(one) == step]
    folder = directory / f"step-{step:08d}{f'.{max(same) + 1}' if same else ''}"
    folder.mkdir()
    return folder


def publish(folder: Path, manifest: Manifest) -> None:
    """Makes a checkpoint visible: its manifest appears, whole, after all else is on the disk."""
    beside = folder / (MANIFEST + ".new")
    write_file(beside, manifest.to_json().encode())
    os.replace(beside, folder / MANIFEST)
    for one in (folder, folder.parent):
        _sync_directory(one)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, and waits until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        DamagedError: It is missing or damaged.
        CheckpointError: It is of another format.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"The manifest of {folder} cannot be read: {error}") from error
    try:
        return Manifest.from_json(text)
    except CheckpointError as error:
        raise type(error)(f"{folder}: {error}") from error


def remove(folder: Path) -> None:
    """Removes a checkpoint: first its manifest, so that it is never there in part."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def prune(directory: Path, keep: int | None, also: Sequence[Path] = ()) -> list[Path]:
    """Removes all but the newest checkpoints; of the same step, all but the newest.

    Args:
        directory: Of checkpoints.
        keep: How many steps stay; None for all.
        also: Folders that stay in any case.

    Returns:
        What was removed.
    """
    newest = {step_of(one): one for one in folders(directory)}
    kept = list(newest.values()) if keep is None else list(newest.values())[-keep:]
    gone = [one for one in folders(directory) if one not in kept and one not in also]
    for one in gone:
        remove(one)
    return gone


def read_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """All further files of a checkpoint, by name; see `read_file`."""
    return {name: read_file(folder, manifest, name) for name in manifest.files}


def read_file(folder: Path, manifest: Manifest, name: str) -> bytes:
    """A further file of a checkpoint.

    Raises:
        DamagedError: It is missing, or its checksum is not that of the manifest.
    """
    try:
        found = (folder / name).read_bytes()
    except OSError as error:
        raise DamagedError(f"A file of {folder} cannot be read: {error}") from error
    if hashlib.sha256(found).hexdigest() != manifest.files.get(name):
        raise DamagedError(f"The checksum of {folder / name} is not the manifest's: it is damaged.")
    return found
