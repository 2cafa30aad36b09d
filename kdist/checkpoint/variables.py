"""The parts behind a model's variables: read once each, written to every copy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdist.checkpoint.manifest import Box, CheckpointError, SavedArray, SavedPart
from kdist.checkpoint.store import Reader, dtype_of
from kdist.optimizer.local import Vectors
from kdist.plan.bucket import Piece
from kdist.storage.variables import Part, parts_of

import keras
import numpy as np
import tensorflow as tf

AHEAD_BYTES = 32 << 20
"""Boxes of at most so many bytes are read from files while earlier ones go to their devices."""

THREADS = 8
"""Copy to host memory, at most; a few take all the bandwidth that there is."""


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A variable, by the disjoint boxes that its parts lie in.

    Attributes:
        path: Of the variable.
        shape: Of the variable.
        dtype: Of its elements.
        copies: Box -> the parts that hold it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    copies: dict[tuple[tuple[int, int], ...], list[Part]]

    @classmethod
    def of(cls, path: str, variable: Any) -> Boxes:
        """Of a Keras variable, or a TensorFlow one."""
        shape = tuple(int(n) for n in variable.shape)
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype == "string":
            raise CheckpointError(f"Variables of strings cannot be saved. Received: {path!r}")
        whole = tuple((0, n) for n in shape)
        copies: dict[tuple[tuple[int, int], ...], list[Part]] = {}
        for part in parts_of(variable):
            index = part.index
            box = whole if index is None else tuple((one.start, one.stop) for one in index)
            copies.setdefault(box, []).append(part)
        if any(box != whole for box in copies):
            # Copies of the whole beside the parts: an optimizer's that must see the whole tensor.
            masters = copies.pop(whole, [])
            copies = dict(sorted(copies.items()))
            return cls(path, shape, dtype, copies | ({whole: masters} if masters else {}))
        return cls(path, shape, dtype, copies)

    @property
    def disjoint(self) -> list[tuple[Box, Part]]:
        """Boxes that tile the variable, each with one part that holds it."""
        found = list(self.copies.items())
        whole = tuple((0, n) for n in self.shape)
        if len(found) > 1:
            found = [(box, parts) for box, parts in found if box != whole]
        return [(as_box(box), parts[0]) for box, parts in found]


def as_box(bounds: Sequence[tuple[int, int]]) -> Box:
    """(start, stop) per dim, as slices."""
    return tuple(slice(a, b) for a, b in bounds)


class HostCopies:
    """Values of parts, in host memory; vectors of buckets once, for all their pieces.

    All are read first, then several are copied at a time, which NumPy does without Python's lock.

    Args:
        targets: What holds the parts.
        copied: Whether they are to be apart from the variables.
    """

    def __init__(self, targets: Iterable[Any], copied: bool = True) -> None:
        holders = {id(one): one for one in map(_holder, targets)}
        tensors = [tf.convert_to_tensor(_value(one)) for one in holders.values()]
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            # An array of a tensor shares what is in host memory, unless it is copied.
            take: Callable[[Any], np.ndarray] = np.array if copied else np.asarray
            self._arrays = dict(zip(holders, pool.map(take, tensors)))

    def of(self, target: Any) -> np.ndarray:
        """The values of what holds a part."""
        values = self._arrays[id(_holder(target))]
        if not isinstance(target, Piece):
            return values
        return values[target.start : target.start + math.prod(target.shape)].reshape(target.shape)


def _holder(target: Any) -> Any:
    return target.flat if isinstance(target, Piece) else target


def _value(holder: Any) -> Any:
    return holder if isinstance(holder, tf.Variable) else holder.value


def saved(
    key: str, boxes: Boxes, copies: HostCopies
) -> tuple[SavedArray, list[tuple[SavedPart, np.ndarray]]]:
    """What a checkpoint says of a variable, and the values of its parts."""
    found = []
    for n, (box, part) in enumerate(boxes.disjoint):
        shape = tuple(one.stop - one.start for one in box)
        if math.prod(shape) == 0 and boxes.shape and math.prod(boxes.shape):
            continue  # a device without rows of a table that is split by hand
        written = SavedPart(f"{key}/{n}", tuple(one.start for one in box), shape)
        found.append((written, copies.of(part.target).reshape(shape)))
    array = SavedArray(boxes.path, boxes.shape, boxes.dtype, tuple(part for part, _ in found))
    return array, found


def one_part(key: str, values: np.ndarray) -> tuple[SavedArray, tuple[SavedPart, np.ndarray]]:
    """What a checkpoint says of an array that is no variable, and its values."""
    part = SavedPart(key, (0,) * values.ndim, values.shape)
    return SavedArray(key, values.shape, values.dtype.name, (part,)), (part, values.copy())


def restore(pairs: Sequence[tuple[SavedArray, Boxes]], reader: Reader) -> None:
    """Reads each box that a device needs once, and writes it to all that hold it.

    Args:
        pairs: Arrays of a checkpoint, each with the variable that gets its values.
        reader: Of the checkpoint.

    Raises:
        CheckpointError: See `Reader.read`.
    """
    vectors = Vectors()
    for boxes, box, values in _read_ahead(pairs, reader):
        for part in boxes.copies[tuple((one.start, one.stop) for one in box)]:
            _write(part, values.astype(dtype_of(boxes.dtype), copy=False), vectors)
    vectors.finish()


def _write(part: Part, values: np.ndarray, vectors: Vectors) -> None:
    if isinstance(part.target, Piece):
        assert part.device is not None
        vectors.put(part.device, part.target, values)
        return
    with tf.device(part.device) if part.device else contextlib.nullcontext():
        part.target.assign(values)


def _read_ahead(
    pairs: Sequence[tuple[SavedArray, Boxes]], reader: Reader
) -> Iterator[tuple[Boxes, Box, np.ndarray]]:
    """The values of all boxes, in order; some are read while others are used."""
    under_way: list[tuple[SavedArray, Boxes, Box, Any, int]] = []
    ahead = 0
    for array, boxes in pairs:
        itemsize = dtype_of(array.dtype).itemsize
        for bounds in boxes.copies:
            box = as_box(bounds)
            size = math.prod(b - a for a, b in bounds) * itemsize
            under_way.append((array, boxes, box, reader.begin(array, box), size))
            ahead += size
            while ahead > AHEAD_BYTES:
                first, of, where, begun, read = under_way.pop(0)
                ahead -= read
                yield of, where, reader.finish(first, where, begun)
    for array, boxes, box, begun, _ in under_way:
        yield boxes, box, reader.finish(array, box, begun)
