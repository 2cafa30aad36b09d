"""Arrays in host memory that TensorFlow takes over without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

ALIGNMENT = 64
"""Bytes; TensorFlow wants tensors to begin at a multiple."""


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array to be filled.

    Args:
        shape: Its shape.
        dtype: Of TensorFlow, or its name.
    """
    dtype = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def as_tensor(array: np.ndarray) -> Any:
    """A tensor that takes an array over, without a copy; the array is not used any more."""
    if array.dtype.kind in "bc":
        return tf.constant(array)  # of which there are no unsigned integers
    bits = np.dtype(f"u{array.dtype.itemsize}")  # NumPy does not hand bfloat16 on
    shared = tf.experimental.dlpack.from_dlpack(array.view(bits).__dlpack__())
    return tf.bitcast(shared, tf.as_dtype(array.dtype))
