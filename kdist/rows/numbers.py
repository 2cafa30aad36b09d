"""Numbers that a graph fixes: sizes, and what is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

SMALL = 64
"""Constants of up to so many values are looked at."""
DEPTH = 16
"""How far back a number is followed."""

_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Pow": np.power,
    "Sub": np.subtract,
}
_DIVISIONS = {"Div", "DivNoNan", "RealDiv"}
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "Max": np.max,
    "Mean": np.mean,
    "Min": np.min,
    "Prod": np.prod,
    "Sum": np.sum,
}
_SAME = {"Identity", "Snapshot", "StopGradient"}


def fixed(tensor: Any, depth: int = DEPTH, most: int = SMALL) -> np.ndarray | None:
    """The value of a small tensor that no input of the graph decides; None if it is not fixed.

    Args:
        tensor: Of a graph.
        depth: How far back to look.
        most: How many values it may have.
    """
    size = tensor.shape.num_elements()
    if size is None or size > most or depth == 0:
        return None
    value = tf.get_static_value(tensor)
    if value is not None:
        return np.asarray(value)
    op = tensor.op
    if op.type in _SAME or op.type == "Cast":
        source = fixed(op.inputs[0], depth - 1, most)
        return source if source is None else source.astype(tensor.dtype.as_numpy_dtype)
    if op.type in ("Reshape", "Squeeze", "ExpandDims"):
        source = fixed(op.inputs[0], depth - 1, most)
        return source if source is None else source.reshape(tensor.shape)
    known = [fixed(t, depth - 1, most) for t in op.inputs]
    if op.type == "Minimum" and (bound := _bounded(op, known, depth)) is not None:
        return bound
    if any(k is None for k in known) or not known:
        return None
    return _computed(op, [np.asarray(k) for k in known])


def _bounded(op: Any, known: list[np.ndarray | None], depth: int) -> np.ndarray | None:
    """The number between a number and itself: `min(n, max(n, x))`, which counting asks for."""
    for number, other in zip(known, reversed(op.inputs), strict=True):
        if number is not None and other.op.type == "Maximum":
            least = [fixed(t, depth - 1) for t in other.op.inputs]
            if any(one is not None and np.all(one >= number) for one in least):
                return number
    return None


def _computed(op: Any, known: list[np.ndarray]) -> np.ndarray | None:
    if op.type in _BINARY:
        return np.asarray(_BINARY[op.type](*known))
    if op.type in _DIVISIONS:
        return np.asarray(known[0] / known[1]) if np.all(known[1]) else None
    if op.type in _REDUCTIONS:
        axes = tuple(int(a) for a in known[1].reshape(-1))
        return np.asarray(
            _REDUCTIONS[op.type](known[0], axis=axes, keepdims=op.get_attr("keep_dims"))
        )
    if op.type == "Range":
        begin, end, step = (one.item() for one in known)
        return np.arange(begin, end, step) if step else None
    if op.type == "Tile":
        return np.tile(known[0], known[1])
    if op.type == "BroadcastTo":
        return np.broadcast_to(known[0], known[1])
    if op.type == "Pack":
        return np.stack(known, op.get_attr("axis"))
    if op.type == "ConcatV2":
        return np.concatenate(known[:-1], int(known[-1]))
    if op.type == "StridedSlice":
        return np.asarray(known[0][_places(op, *known[1:])])
    return None


def _places(op: Any, begin: np.ndarray, end: np.ndarray, stride: np.ndarray) -> tuple[Any, ...]:
    """What stands between the brackets of `x[...]`."""
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }

    def place(i: int) -> Any:
        if masks["ellipsis"] >> i & 1:
            return Ellipsis
        if masks["new_axis"] >> i & 1:
            return None
        if masks["shrink_axis"] >> i & 1:
            return int(begin[i])
        first = None if masks["begin"] >> i & 1 else int(begin[i])
        last = None if masks["end"] >> i & 1 else int(end[i])
        return slice(first, last, int(stride[i]))

    return tuple(place(i) for i in range(len(begin)))


def power_of(array: np.ndarray, batch: int) -> int | None:
    """The power of the batch's size in numbers that a trace contains.

    Python computes with sizes before TensorFlow sees them, so a trace has `B`, `2 * B`, `B - 1` or
    `1 / B` as plain numbers. `batch` is chosen such that they do not occur otherwise.

    Args:
        array: The numbers; of more than `SMALL` none is looked at.
        batch: The batch's size B.

    Returns:
        1, -1, 0, or None: it depends on the size in another way, or entries differ in power.
    """
    if array.size == 0 or array.size > SMALL or array.dtype.kind not in "iuf":
        return 0
    found = {_power(float(v), batch) for v in array.reshape(-1)}
    return found.pop() if len(found) == 1 else None


def _power(value: float, batch: int) -> int | None:
    size = abs(value)
    if not np.isfinite(value) or size == 0 or size > 1e12:
        return 0
    if (size / batch).is_integer():
        return 1
    times = 1 / size / batch
    if 0.5 < times < 1e4 and abs(times - round(times)) < 1e-6 * times:
        return -1
    near = (abs(size - k * batch) <= 2 for k in (1, 2, 3))
    return None if any(near) else 0
