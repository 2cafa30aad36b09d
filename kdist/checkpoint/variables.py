"""The parts behind a model's variables: read once each, written to every copy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdist.checkpoint.codes import described
from kdist.checkpoint.manifest import Box, CheckpointError, SavedArray, SavedPart
from kdist.checkpoint.store import Reader, dtype_of
from kdist.optimizer.formatted_slots import coded
from kdist.optimizer.logical_slots import Vectors
from kdist.sharding.device import Device
from kdist.storage.flat_rows import Piece
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
        # Of a table that is split by hand one part may be the whole, beside empty ones.
        if any(box != whole and all(a < b for a, b in box) for box, _ in found):
            found = [(box, parts) for box, parts in found if box != whole]
        return [(as_box(box), parts[0]) for box, parts in found]


def as_box(bounds: Sequence[tuple[int, int]]) -> Box:
    """(start, stop) per dim, as slices."""
    return tuple(slice(a, b) for a, b in bounds)


@dataclasses.dataclass(frozen=True)
class Written:
    """A part that is to be written, and what holds its values.

    Attributes:
        part: As the checkpoint describes it.
        target: Of the part, see `storage.variables.Part`.
        as_codes: Whether its codes are written, not what they mean.
    """

    part: SavedPart
    target: Any
    as_codes: bool = False

    @property
    def holder(self) -> Any:
        """The variable with the values: a bucket's vector holds those of all its pieces."""
        held = _held(self.target)
        slot = coded(held) if self.as_codes else None
        return held if slot is None else slot.codes

    @property
    def start(self) -> int:
        """Its first element in the holder."""
        return self.target.start if isinstance(self.target, Piece) else 0

    @property
    def process(self) -> int:
        """Where the values are."""
        return Device.parse(_value(self.holder).device).process[1]


def tensors_of(parts: Sequence[Written]) -> dict[int, Any]:
    """The values of what holds some parts, by its identity; each once, where it lies."""
    holders = {id(one.holder): one.holder for one in parts}
    return {key: tf.convert_to_tensor(_value(one)) for key, one in holders.items()}


def in_host_memory(
    parts: Sequence[Written], copied: bool = True
) -> list[tuple[SavedPart, np.ndarray]]:
    """Values of parts, in this process's memory.

    All are read first, then several are copied at a time, which NumPy does without Python's lock.

    Args:
        parts: What to take.
        copied: Whether they are to be apart from the variables.
    """
    tensors = tensors_of(parts)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        # An array of a tensor shares what is in host memory, unless it is copied.
        take: Callable[[Any], np.ndarray] = np.array if copied else np.asarray
        arrays = dict(zip(tensors, pool.map(take, tensors.values())))
    return [(one.part, cut(arrays[id(one.holder)], one.start, one.part.shape)) for one in parts]


def cut(values: np.ndarray, start: int, shape: Sequence[int]) -> np.ndarray:
    """A part's values among those of what holds it."""
    if math.prod(shape) == values.size:
        return values.reshape(shape)
    return values[start : start + math.prod(shape)].reshape(shape)


def _held(target: Any) -> Any:
    return target.flat if isinstance(target, Piece) else target


def _codes(parts: Sequence[Part]) -> str:
    """What all parts are codes of, described; "" if some hold numbers, or are coded otherwise."""
    slots = [coded(_held(part.target)) for part in parts]
    forms = {None if slot is None else slot.format for slot in slots}
    form = forms.pop() if len(forms) == 1 else None
    if form is None:
        return ""
    return described(form.signed, form.exponent_bits, form.mantissa_bits, form.bias)


def _value(holder: Any) -> Any:
    return holder if isinstance(holder, tf.Variable) else holder.value


def saved(
    key: str, boxes: Boxes, store_of: Callable[[Written], str]
) -> tuple[SavedArray, list[Written]]:
    """What a checkpoint says of a variable, and its parts.

    Args:
        key: Of its parts.
        boxes: Of the variable.
        store_of: The store that a part is written to.
    """
    found = []
    codes = _codes([part for _, part in boxes.disjoint])
    for n, (box, part) in enumerate(boxes.disjoint):
        shape = tuple(one.stop - one.start for one in box)
        if math.prod(shape) == 0 and boxes.shape and math.prod(boxes.shape):
            continue  # a device without rows of a table that is split by hand
        saved_part = SavedPart(f"{key}/{n}", tuple(s.start for s in box), shape)
        one = Written(saved_part, part.target, bool(codes))
        found.append(dataclasses.replace(one, part=one.part.to(store_of(one))))
    parts = tuple(one.part for one in found)
    array = SavedArray(boxes.path, boxes.shape, boxes.dtype, parts, codes)
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
