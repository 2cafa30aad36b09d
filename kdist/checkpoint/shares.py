"""Each process writes its own parts of a checkpoint, into a store of its own.

So no state is sent, and no process holds that of others. It needs a directory that all processes
share, as training that goes on after a failure does; where one has another directory by that name,
process 0 writes its parts, and says so.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdist.checkpoint import store
from kdist.checkpoint.manifest import STORE, CheckpointError, SavedPart
from kdist.checkpoint.variables import Written, cut, tensors_of
from kdist.cluster.elsewhere import ElsewhereError, Running, hand_over
from kdist.cluster.errors import PeerError
from kdist.cluster.held import FUNCTIONS, HandedArrays
from kdist.cluster.joining import controller
from kdist.display.warn import warn

WRITE, ANSWER_MARK, DROP = "checkpoint.write", "checkpoint.answer_mark", "checkpoint.drop"

_writers: dict[Path, frozenset[int]] = {}
"""Directory -> processes that share it."""


def writers(directory: Path) -> frozenset[int]:
    """The other processes that write their own parts: those that share a directory.

    Args:
        directory: Of checkpoints; is made.
    """
    found = controller()
    if found is None:
        return frozenset()
    directory = directory.resolve()
    if directory not in _writers:
        others = range(1, found.place.count)
        sharing = frozenset(_sharing(directory, others))
        _writers[directory] = sharing
        if apart := [k for k in others if k not in sharing]:
            warn(
                f"Process {', '.join(map(str, apart))} of {found.place.count} cannot write to the "
                "directory of checkpoints: process 0 writes their parts too, which are sent to its "
                "memory. Use a directory that all processes share. "
                f"Received: {directory}"
            )
    return _writers[directory]


def _sharing(directory: Path, processes: Sequence[int]) -> list[int]:
    """The processes whose answer to a mark in the directory appears in it."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / f".mark-{secrets.token_hex(8)}"
    mark.write_text(mark.name)
    try:
        asked = {k: Running(k, ANSWER_MARK, mark=str(mark)) for k in processes}
        answered = {k: one.wait() for k, one in asked.items()}
        return [k for k, name in answered.items() if name and Path(name).exists()]
    finally:
        for one in directory.glob(f"{mark.name}*"):
            one.unlink()


def _answer_mark(held: HandedArrays | None, mark: str) -> str | None:
    """Writes a file beside the mark, if it is here."""
    try:
        if Path(mark).read_text() != Path(mark).name:
            return None
        answer = Path(f"{mark}.{secrets.token_hex(8)}")
        answer.touch()
    except OSError:
        return None
    return str(answer)


def store_of(process: int) -> str:
    """The store of a process other than 0."""
    return f"{STORE}.{process}"


class RemoteShare:
    """What another process writes; see `writer.RemoteShare`.

    Args:
        process: Its number.
        parts: With values there.
        copied: Whether the values are to stay as they are while training goes on.
    """

    def __init__(self, process: int, parts: Sequence[Written], copied: bool) -> None:
        tensors = tensors_of(parts)
        order = {key: n for n, key in enumerate(tensors)}
        about = [
            (order[id(one.holder)], one.start, one.part.key, one.part.shape, one.part.store)
            for one in parts
        ]
        self._process = process
        self._number = hand_over(process, list(tensors.values()), about, copied)
        self._running: Running | None = None
        self._dropped = weakref.finalize(self, _drop, process, self._number)
        self._dropped.atexit = False

    def begin(self, folder: Path, compression: store.Compression) -> None:
        """Has it written, in the background."""
        self._dropped.detach()
        where = {"folder": str(folder.resolve()), "compression": compression}
        self._running = Running(self._process, WRITE, self._number, **where)

    def finish(self) -> None:
        """Waits until it is written.

        Raises:
            CheckpointError: The file system of that process refuses.
            kdist.comm.PeerError: A process failed.
        """
        assert self._running is not None
        try:
            self._running.wait()
        except ElsewhereError as error:
            raise CheckpointError(str(error)) from error


def _drop(process: int, number: int) -> None:
    """Lets go what will not be written."""
    with contextlib.suppress(PeerError):
        Running(process, DROP, number)


def _write(held: HandedArrays, folder: str, compression: store.Compression) -> None:
    parts = [
        (SavedPart(key, (0,) * len(shape), tuple(shape), name), cut(held.arrays[n], start, shape))
        for n, start, key, shape, name in held.about
    ]
    store.write(Path(folder), parts, compression)


def _let_go(held: HandedArrays) -> None:
    """Nothing is left to do."""


_functions: dict[str, Any] = {WRITE: _write, ANSWER_MARK: _answer_mark, DROP: _let_go}
FUNCTIONS.update(_functions)
