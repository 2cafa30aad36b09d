"""Values of a new variable, part by part: the very ones that its initializer gives it whole.

TensorFlow's stateless draws count: element i of a draw follows from the seed and from i, by the
counter of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). So a part
is drawn by a counter that is set forward. A truncated normal rejects numbers, and has a stretch of
the counter for each group of elements.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeGuard

from kdist._compat import keras_births
from kdist.sharding.placement import Index, shape_of
from kdist.storage.host_arrays import aligned, as_tensor

import keras
import numpy as np
import tensorflow as tf

CHUNK = 4 << 20
"""Bytes that are drawn at once, at most, but for a single element."""

_DRAWS = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_STRETCH = 64
"""Steps of the counter that a truncated normal has for an element; others take one for a group."""


class Recipe(Protocol):
    """Gives the values of a variable."""

    @property
    def whole(self) -> bool:
        """Whether it can give all of them at once only."""

    def block(self, shape: tuple[int, ...], dtype: str, start: int, count: int) -> Any:
        """`count` elements from the `start`-th on, in row-major order; (count,)."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float
    whole: bool = False

    def block(self, shape: tuple[int, ...], dtype: str, start: int, count: int) -> Any:
        """See `Recipe`."""
        return tf.fill([count], tf.cast(self.value, dtype))


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """One number on the diagonal of a matrix, zeros elsewhere."""

    value: float
    whole: bool = False

    def block(self, shape: tuple[int, ...], dtype: str, start: int, count: int) -> Any:
        """See `Recipe`."""
        apart = shape[1] + 1
        first, stop = (min(-(-at // apart), *shape) for at in (start, start + count))
        places = np.arange(first, stop)[:, None] * apart - start
        return tf.scatter_nd(
            places, tf.fill([len(places)], tf.constant(self.value, dtype)), [count]
        )


@dataclasses.dataclass(frozen=True)
class Draw:
    """One draw of `keras.random`.

    Attributes:
        kind: "uniform", "normal" or "truncated_normal".
        bounds: `minval` and `maxval`, or `mean` and `stddev`.
        seed: int32, (2,).
    """

    kind: str
    bounds: dict[str, Any]
    seed: Any
    whole: bool = False

    def block(self, shape: tuple[int, ...], dtype: str, start: int, count: int) -> Any:
        """See `Recipe`."""
        group = 2 if dtype == "float64" else 4
        first = start // group
        steps = first * (group * _STRETCH if self.kind == "truncated_normal" else 1)
        made = tf.raw_ops.StatelessRandomGetKeyCounter(seed=self.seed)
        drawn = _DRAWS[self.kind](
            shape=[start + count - first * group],
            key=made.key,
            counter=_forward(made.counter.numpy(), steps),
            alg=tf.raw_ops.StatelessRandomGetAlg(),
            dtype=tf.as_dtype(dtype),
        )[start - first * group :]
        # As TensorFlow scales them, operation by operation; two results at a time are there.
        if self.kind == "uniform":
            low, high = (tf.cast(self.bounds[name], dtype) for name in ("minval", "maxval"))
            drawn = drawn * (high - low)
            return drawn + low
        mean, stddev = (tf.constant(self.bounds[name], dtype) for name in ("mean", "stddev"))
        drawn = drawn * stddev
        return drawn + mean


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """An initializer that cannot give parts: all is made, and what is not wanted dropped."""

    initializer: Callable[..., Any]
    whole: bool = True

    def block(self, shape: tuple[int, ...], dtype: str, start: int, count: int) -> Any:
        """See `Recipe`."""
        made = tf.reshape(self.initializer(shape, dtype=dtype), [-1])
        return made[start : start + count]


@dataclasses.dataclass(frozen=True)
class Existing:
    """Values that are there already.

    Attributes:
        values: In host memory, or in a file that is mapped into it.
        file: What the file was like then; None for an array in memory.
    """

    values: np.ndarray = dataclasses.field(repr=False)  # a file that was cut short ends readers
    file: tuple[int, ...] | None
    whole: bool = False

    @classmethod
    def of(cls, values: np.ndarray) -> Existing:
        """Of an array that does not change, or of one of `is_mapped`, which is read later."""
        return cls(values, _state_of(values.filename) if is_mapped(values) else None)

    def block(self, shape: tuple[int, ...], dtype: str, start: int, count: int) -> Any:
        """See `Recipe`, and `checked`."""
        found = self.checked().reshape(-1)[start : start + count]
        return tf.constant(found.astype(tf.as_dtype(dtype).as_numpy_dtype))

    def part(self, index: Index, dtype: str) -> Any:
        """The values in a box, in host memory; see `checked`."""
        array = aligned(shape_of(index), dtype)
        array[...] = self.checked()[index]
        return as_tensor(array)

    def checked(self) -> np.ndarray:
        """The values.

        Raises:
            ValueError: The file has been written to since.
        """
        if self.file is not None:
            name = self.values.filename  # type: ignore[attr-defined]
            now = _state_of(name)
            # Another file of that name, or none, leaves the one that is mapped as it was.
            if now is not None and now[:2] == self.file[:2] and now != self.file:
                raise ValueError(
                    "A file of weights changed before the model read it: in a kdist.scope weights "
                    "are read when their parts are first used, once it is known where they go. "
                    "Use the model first (compile it, and call it once), or write to another file. "
                    f"Received: file={str(name)!r}"
                )
        return self.values


def is_mapped(values: Any) -> TypeGuard[np.memmap]:
    """Whether values lie in a file, which nobody writes to through them; copies of such do not."""
    return isinstance(values, np.memmap) and values.filename is not None and values.mode == "r"


def _state_of(name: Any) -> tuple[int, ...] | None:
    """The identity of a file, its size, and when it was written; None if it is gone."""
    try:
        found = os.stat(name)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _forward(counter: np.ndarray, steps: int) -> Any:
    low, high = (int(one) for one in counter)
    number = (low | high << 64) + steps
    mask = (1 << 64) - 1
    return tf.constant(np.array([number & mask, number >> 64 & mask], np.uint64))


def recipe_of(initializer: Any, shape: tuple[int, ...], dtype: str) -> Recipe | None:
    """How to make a variable's values later; takes the seed now, as the initializer would.

    Returns:
        None for what has to be made now: it may depend on what was made before it.
    """
    kind = type(initializer)
    if kind is keras.initializers.Zeros:
        return Constant(0)
    if kind is keras.initializers.Ones:
        return Constant(1)
    if kind is keras.initializers.Constant and np.ndim(initializer.value) == 0:
        return Constant(initializer.value)
    if keras_births.draws_once(initializer) and tf.as_dtype(dtype).is_floating:
        return Draw(*keras_births.recorded_draw(initializer, shape, dtype))
    if kind is keras.initializers.Identity and len(shape) == 2 and tf.as_dtype(dtype).is_floating:
        return Diagonal(initializer.gain)
    if kind is keras.initializers.Orthogonal and isinstance(initializer.seed, int):
        return AtOnce(initializer)
    return None


def blocks(recipe: Recipe, shape: tuple[int, ...], dtype: str) -> Iterator[Index]:
    """Boxes that tile a variable, each contiguous in row-major order and of a chunk at most."""
    if recipe.whole or not shape:
        yield tuple(slice(0, n) for n in shape)
        return
    if 0 in shape:
        return
    limit = max(1, CHUNK // tf.as_dtype(dtype).size)
    sizes = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dim = next(d for d, size in enumerate(sizes) if size <= limit)
    step = max(1, limit // sizes[dim])
    for outer in itertools.product(*(range(n) for n in shape[:dim])):
        for start in range(0, shape[dim], step):
            ahead = tuple(slice(i, i + 1) for i in outer)
            rest = tuple(slice(0, n) for n in shape[dim + 1 :])
            yield (*ahead, slice(start, min(start + step, shape[dim])), *rest)


def values(recipe: Recipe, shape: tuple[int, ...], dtype: str, box: Index) -> Any:
    """The values of one of `blocks`, in its shape."""
    size = tuple(one.stop - one.start for one in box)
    start = 0
    for one, n in zip(box, shape, strict=True):
        start = start * n + one.start
    return tf.reshape(recipe.block(shape, dtype, start, math.prod(size)), size)
