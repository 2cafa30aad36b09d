"""Arrays in files, by TensorStore: zarr arrays in one OCDBT key-value store per checkpoint.

TensorStore (Google's library below Orbax) does the chunks, the concurrency, the checksums and the
atomic transaction; here is only what is asked of it. Every chunk carries a CRC-32C, so a flipped
bit is an error when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from kdist.checkpoint.codes import decode
from kdist.checkpoint.manifest import Box, CheckpointError, DamagedError, SavedArray, SavedPart

import numpy as np
import tensorstore as ts

CHUNK_BYTES = 16 << 20
"""Chunks are no larger, so that reading a part of an array reads little of the rest."""

Compression = Literal["none", "zstd"]


def write(
    folder: Path, parts: Iterable[tuple[SavedPart, np.ndarray]], compression: Compression = "none"
) -> None:
    """Writes arrays in one atomic transaction: all of them, or none.

    Args:
        folder: Of the checkpoint; exists.
        parts: Each with its values, which must not change meanwhile.
        compression: "zstd" compresses the chunks: slower, and little gained on trained weights.

    Raises:
        CheckpointError: The file system refuses, as a full disk does.
    """
    # Of one context with a cache, so that all arrays share one writer: without, each is a commit.
    shared = {"transaction": ts.Transaction(atomic=True), "context": _context()}
    try:
        opened = [
            (ts.open(_new(folder, part, values, compression), **shared), values)
            for part, values in parts
        ]
        # The futures are held: TensorStore cancels what nobody waits for.
        copies = [
            array.result().write(values, can_reference_source_data_indefinitely=True).copy
            for array, values in opened
        ]
        for copy in copies:
            copy.result()
        shared["transaction"].commit_sync()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"Cannot write arrays in {folder}: {error}") from error


def _context() -> Any:
    """What opened arrays share: the store's own nodes, which they have in common."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 32 << 20}})


def _new(
    folder: Path, part: SavedPart, values: np.ndarray, compression: Compression
) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 1}})
    codecs.append({"name": "crc32c"})
    grid = {"chunk_shape": chunk_shape(values.shape, values.dtype.itemsize)}
    return {
        **_spec(folder, part),
        "metadata": {
            "shape": list(values.shape),
            "data_type": values.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": grid},
            "codecs": codecs,
        },
        "create": True,
    }


def _spec(folder: Path, part: SavedPart) -> dict[str, Any]:
    # Not as an address, in which some characters of a path mean something else.
    base = {"driver": "file", "path": f"{folder.resolve()}/{part.store}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{part.key}/"}
    return {"driver": "zarr3", "kvstore": kvstore}


def chunk_shape(shape: Sequence[int], itemsize: int, limit: int = CHUNK_BYTES) -> list[int]:
    """The chunks of an array: whole in its last dims, cut in its first, at most `limit` bytes.

    Args:
        shape: Of the array.
        itemsize: Bytes of an element.
        limit: Bytes of a chunk; a single element may be more.
    """
    chunk = [max(n, 1) for n in shape]
    for dim in range(len(chunk)):
        rest = math.prod(chunk[dim + 1 :]) * itemsize
        chunk[dim] = max(min(chunk[dim], limit // rest), 1)
        if chunk[dim] > 1 or rest <= limit:
            break
    return chunk


class Reader:
    """Reads boxes of the arrays of one checkpoint; each part is opened once.

    Args:
        folder: Of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Its own, so that nothing cached hides a file that has changed.
        self._context = _context()
        self._opened: dict[str, Any] = {}

    def begin(self, array: SavedArray, box: Box) -> Any:
        """Starts to read a box; several may be under way at once.

        Args:
            array: Of this checkpoint.
            box: Which part of it, in its own coordinates.

        Returns:
            What `finish` takes.
        """
        meeting = [part for part in array.parts if _meet(part.box, box)]
        if not meeting:
            return None
        try:
            stores = [self._open(part) for part in meeting]
            joined = stores[0] if len(stores) == 1 else ts.overlay(stores)
            return joined[box].read() if box else joined.read()
        except (ValueError, OSError) as error:
            raise self._damaged(array, error) from error

    def finish(self, array: SavedArray, box: Box, begun: Any) -> np.ndarray:
        """The values of a box, once they are there.

        Raises:
            DamagedError: Files are missing, cut short or changed, or no part lies where the box
                is; it names the array.
        """
        if begun is None:
            shape = [one.stop - one.start for one in box]
            if math.prod(shape):
                raise self._damaged(array, ValueError(f"no part of it lies in {_bounds(box)}"))
            return np.empty(shape, dtype_of(array.dtype))
        try:
            values = np.asarray(begun.result())
        except (ValueError, OSError) as error:
            raise self._damaged(array, error) from error
        return decode(values, array.codes, dtype_of(array.dtype)) if array.codes else values

    def read(self, array: SavedArray, box: Box | None = None) -> np.ndarray:
        """The values of a box, by default of the whole array; see `finish`."""
        box = tuple(slice(0, n) for n in array.shape) if box is None else box
        return self.finish(array, box, self.begin(array, box))

    def _open(self, part: SavedPart) -> Any:
        if part.key not in self._opened:
            found = ts.open(_spec(self.folder, part), context=self._context).result()
            if tuple(found.shape) != part.shape:
                raise ValueError(f"shape {tuple(found.shape)} is not {part.shape}")
            self._opened[part.key] = found.translate_to[part.start] if part.start else found
        return self._opened[part.key]

    def _damaged(self, array: SavedArray, error: Exception) -> DamagedError:
        reason = str(error).split(" [source locations", 1)[0]
        return DamagedError(
            f"Array {array.path!r} of the checkpoint {self.folder} cannot be read: {reason}"
        )


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a name, bfloat16 and its like included."""
    return ts.dtype(name).numpy_dtype


def can_hold(dtype: np.dtype) -> bool:
    """Whether arrays of a dtype can be written: numbers that TensorStore has."""
    try:
        return bool(ts.dtype(dtype.name).numpy_dtype == dtype)
    except ValueError:
        return False


def _bounds(box: Box) -> list[tuple[int, int]]:
    return [(one.start, one.stop) for one in box]


def _meet(a: Box, b: Box) -> bool:
    return all(max(x.start, y.start) < min(x.stop, y.stop) for x, y in zip(a, b))
