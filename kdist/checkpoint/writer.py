"""Writes checkpoints, now or in the background, and leaves as many as are wanted."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kdist.checkpoint import directory as directories
from kdist.checkpoint import store
from kdist.checkpoint.manifest import Manifest, SavedPart

import numpy as np


class Share(Protocol):
    """Parts that another process writes into its own store."""

    def begin(self, folder: Path, compression: store.Compression) -> None:
        """Starts to write into a checkpoint's folder."""

    def finish(self) -> None:
        """Waits until all is written; raises what writing raised."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A checkpoint in host memory.

    Attributes:
        manifest: What it says of itself; `files` is filled in when it is written.
        parts: The values of its arrays.
        files: Name -> bytes of further files.
        others: What other processes write.
    """

    manifest: Manifest
    parts: Sequence[tuple[SavedPart, np.ndarray]]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    others: Sequence[Share] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in this process."""
        return sum(values.nbytes for _, values in self.parts)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where checkpoints go.

    Attributes:
        directory: Of checkpoints.
        keep: How many of them stay; None for all.
        compression: See `store.write`.
    """

    directory: Path
    keep: int | None = None
    compression: store.Compression = "none"


def write(snapshot: Snapshot, target: Target, also: Sequence[Path] = ()) -> Path:
    """Writes a checkpoint, then removes those that are too many.

    Args:
        snapshot: What to write.
        target: Where.
        also: Checkpoints that stay in any case.

    Returns:
        Its folder.

    Raises:
        CheckpointError: The arrays cannot be written; checkpoints that were there are still there.
        OSError: Another file cannot be.
    """
    folder = directories.new_folder(target.directory, snapshot.manifest.step)
    with contextlib.ExitStack() as under_way:
        for one in snapshot.others:
            one.begin(folder, target.compression)
            under_way.callback(one.finish)
        store.write(folder, snapshot.parts, target.compression)
    sums = {}
    for name, content in snapshot.files.items():
        directories.write_file(folder / name, content)
        sums[name] = hashlib.sha256(content).hexdigest()
    directories.publish(folder, dataclasses.replace(snapshot.manifest, files=sums))
    directories.prune(target.directory, target.keep, (folder, *also))
    return folder


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, while training goes on.

    A thread is enough: TensorStore computes and writes without Python's lock.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.written: Path | None = None
        """The checkpoint written last."""

    def start(self, work: Callable[[], Path]) -> None:
        """Begins to write; waits first for what is being written.

        Args:
            work: Writes a checkpoint, and returns its folder.
        """
        self.wait()

        def run() -> None:
            try:
                self.written = work()
            except BaseException as error:  # told to the caller, who waits for it
                self._error = error

        self._thread = threading.Thread(target=run, name="kdist checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            Exception: What writing raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
