"""The mathematics of compressed gradients: pure functions of tensors.

PowerSGD on p replicas, with error feedback; `sum` is an all-reduce over the data axis, and every
line else runs on each replica alone:

```
m_i = as_matrix(gradient_i) + error_i
p   = orthogonalize(sum_i left(m_i, q))
q_i = right(m_i, p)
error_i = residual(m_i, p, q_i)                    what this replica's gradient lost
q   = sum_i q_i                                    also the next step's start, if warm
gradient = as_tensor(decompress(p, q), shape)      the same on every replica: p p^T sum_i m_i
```

The sums are kdist's: gradients already carry their replica's share of the loss, so no mean is
taken. p p^T is a projection, so where the rank of sum_i m_i is at most the number of columns, the
sum is exact. Over steps, the sum of decompressed gradients is the sum of the gradients less the
last errors. A step that is skipped (a gradient was not finite) must leave errors and q as they
were: one NaN in an error would stay for ever.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from kdist.config.compression import PowerSGD, matrix_cut, matrix_shape

import tensorflow as tf

FP16_TOP = 15
"""The sum of all replicas' values, before rounding, is at most 2^15 after scaling."""
FP16_REPLICAS = 1024
"""So many additions raise 2^15 by rounding to less than 65504, float16's largest number."""


def as_matrix(gradient: Any) -> tf.Tensor:
    """A gradient as the matrix of `matrix_shape`; float16 and bfloat16 become float32."""
    gradient = tf.convert_to_tensor(gradient)
    dtype = gradient.dtype if gradient.dtype.size >= 4 else tf.float32
    return tf.cast(tf.reshape(gradient, matrix_shape(gradient.shape)), dtype)


def as_tensor(matrix: Any, shape: Sequence[int]) -> tf.Tensor:
    """The inverse of `as_matrix`, but for the dtype."""
    return tf.reshape(matrix, shape)


def initial_q(
    name: str, shape: Sequence[int], compressor: PowerSGD, dtype: Any, step: Any = 0
) -> tf.Tensor:
    """The first Q: standard normal, the same on every replica and in every process.

    Args:
        name: Of the matrix; matrices draw independently.
        shape: Of the gradient.
        compressor: Rank and seed.
        dtype: tf.float32 or tf.float64.
        step: Number of the step, for a cold start; may be a tensor.

    Returns:
        Shape (columns, rank).

    Raises:
        ValueError: If the rank is larger than the smaller side of the matrix.
    """
    rows, columns = matrix_shape(shape)
    if compressor.rank > min(rows, columns):
        raise ValueError(
            f"The rank is at most the smaller side of the matrix, here {rows} x {columns}. Use a "
            f"smaller rank, or no compression. Received: rank={compressor.rank} for {name!r}"
        )
    return tf.random.stateless_normal(
        (columns, compressor.rank),
        seed=tf.stack(
            [
                tf.constant(compressor.seed, tf.int64) + tf.cast(step, tf.int64),
                tf.constant(zlib.crc32(name.encode()), tf.int64),
            ]
        ),
        dtype=dtype,
        alg="philox",
    )


def left(m: Any, q: Any) -> tf.Tensor:
    """M Q: (rows, columns) by (columns, rank). Summed over the replicas, then orthogonalised."""
    return tf.linalg.matmul(m, q)


def orthogonalize(p: Any) -> tf.Tensor:
    """An orthonormal basis, (rows, rank), of a space that contains the columns of P.

    By Householder's QR, which gives orthonormal columns for any P: those that depend on others,
    or are zero, are replaced by some direction orthogonal to the rest, which can only make the
    projection closer. Columns are scaled first (that does not change the basis), so that squares
    of small gradients do not underflow.
    """
    p = tf.convert_to_tensor(p)
    largest = tf.reduce_max(tf.abs(p), axis=0, keepdims=True)
    basis, _ = tf.linalg.qr(p / tf.where(largest > 0, largest, tf.ones_like(largest)))
    return basis


def right(m: Any, p: Any) -> tf.Tensor:
    """M^T P: (columns, rank). Summed over the replicas."""
    return tf.linalg.matmul(m, p, transpose_a=True)


def decompress(p: Any, q: Any) -> tf.Tensor:
    """P Q^T: (rows, columns)."""
    return tf.linalg.matmul(p, q, transpose_b=True)


def decompressed(
    p: Any, q: Any, shape: Sequence[int], index: Sequence[slice] | None = None
) -> tf.Tensor:
    """P Q^T as the tensor that was compressed, or a part of it, from the factors' rows alone.

    Args:
        p: (rows, rank).
        q: (columns, rank).
        shape: Shape of the tensor.
        index: The part; all of it by default.
    """
    if index is None:
        return as_tensor(decompress(p, q), shape)
    cut, rank = matrix_cut(shape), int(p.shape[1])
    halves = [(p, shape[:cut], index[:cut]), (q, shape[cut:], index[cut:])]
    left_rows, right_rows = (
        tf.reshape(tf.reshape(factor, [*dims, rank])[part], [-1, rank])
        for factor, dims, part in halves
    )
    return as_tensor(decompress(left_rows, right_rows), [i.stop - i.start for i in index])


def residual(m: Any, p: Any, q: Any) -> tf.Tensor:
    """M - P Q^T: what a replica adds to its next gradient; `q` is its own, before the sum."""
    return m - decompress(p, q)


def largest_finite(gradient: Any) -> tf.Tensor:
    """The largest absolute value that is finite, a scalar; 0 if there is none."""
    size = tf.abs(gradient)
    return tf.reduce_max(tf.where(tf.math.is_finite(size), size, tf.zeros_like(size)))


def fp16_scale(largest: Any, replicas: int) -> tf.Tensor:
    """The power of two that a gradient is multiplied by before it travels in float16.

    The largest one with which no sum over the replicas can overflow: replicas * largest * scale is
    at most 2^15, and rounding adds less than another 2^15. Values from 2^-29 of that bound on keep
    float16's full precision (relative error up to 2^-11 each, and again for each addition in
    float16); below 2^-40 of it they become 0. Infinity and NaN travel as they are.

    Args:
        largest: `largest_finite` of the gradients, maximum over the replicas; float32 or float64.
        replicas: How many gradients are added.

    Raises:
        ValueError: For fewer than 1 or more than 1024 replicas.
    """
    if not 1 <= replicas <= FP16_REPLICAS:
        raise ValueError(
            f"A sum in float16 is safe from overflow for 1 to {FP16_REPLICAS} replicas. Use "
            f"'bf16', whose range is float32's. Received: replicas={replicas}"
        )
    largest = tf.convert_to_tensor(largest)
    wide = largest.dtype == tf.float64
    integer, bits, bias = (tf.int64, 52, 1023) if wide else (tf.int32, 23, 127)
    field = tf.bitwise.right_shift(tf.cast(tf.bitcast(largest, integer), tf.int64), bits)
    room = FP16_TOP - math.ceil(math.log2(replicas))
    # largest < 2^(field - bias + 1)
    exponent = tf.minimum(room - (field - bias + 1), bias - 1)
    scale = tf.bitwise.left_shift(exponent + bias, tf.constant(bits, tf.int64))
    return tf.bitcast(tf.cast(scale, integer), largest.dtype)


def to_fp16(gradient: Any, scale: Any) -> tf.Tensor:
    """gradient * scale in float16."""  # noqa: D403
    return tf.cast(gradient * tf.cast(scale, gradient.dtype), tf.float16)


def from_fp16(received: Any, scale: Any, dtype: Any) -> tf.Tensor:
    """The inverse of `to_fp16`, also for a sum of such tensors; the division is exact."""
    return tf.cast(received, dtype) / tf.cast(scale, dtype)


def to_bf16(gradient: Any) -> tf.Tensor:
    """A gradient in bfloat16: float32's range, relative error up to 2^-8.

    Nothing is scaled: a sum overflows where it would in float32. Of a float64 gradient, values
    beyond 3.4e38 become infinity, which a finite check sees.
    """
    return tf.cast(gradient, tf.bfloat16)
