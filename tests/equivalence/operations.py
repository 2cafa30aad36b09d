"""Operations of Keras, each as somebody would write it between two layers.

Every function takes `x`, of shape (rows, 6, 8), whose last dim is cut, and `t`, (rows, 8, 6), whose
middle dim is. It returns one tensor, or several, of any shape and type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

Operation = Callable[[Any, Any], Any]


def _both(function: Callable[[Any], Any]) -> Operation:
    return lambda x, t: (function(x), function(t))


def _positive(function: Callable[[Any], Any]) -> Operation:
    return _both(lambda x: function(ops.abs(x) + 0.5))


def _within(function: Callable[[Any], Any]) -> Operation:
    return _both(lambda x: function(0.9 * ops.tanh(x)))


def _pair(function: Callable[[Any, Any], Any]) -> Operation:
    """With a tensor that is cut alike, one that is cut elsewhere, and one that is whole."""

    def call(x: Any, t: Any) -> Any:
        whole = np.linspace(-1.0, 1.0, 8)
        return (
            function(x, ops.sin(x)),
            function(x, ops.transpose(t, (0, 2, 1)) * 0.5),
            function(x, ops.convert_to_tensor(whole, x.dtype)),
        )

    return call


def _ints(function: Callable[[Any], Any]) -> Operation:
    return _both(lambda x: function(ops.cast(ops.floor(4 * x), "int32")))


def _int_pair(function: Callable[[Any, Any], Any]) -> Operation:
    def number(x: Any) -> Any:
        return ops.cast(ops.floor(4 * ops.abs(x)) + 1, "int32")

    return lambda x, t: function(number(x), number(ops.transpose(t, (0, 2, 1)) * 2.0))


def _axes(function: Callable[..., Any]) -> Operation:
    """Along each dim."""
    return lambda x, t: [function(x, axis=axis) for axis in (0, 1, 2)]


def _reduced(function: Callable[..., Any]) -> Operation:
    """Along each dim, along two, and over all."""

    def call(x: Any, t: Any) -> Any:
        axes: list[Any] = [0, 1, 2, (1, 2), None]
        return [function(x, axis=a) for a in axes] + [function(x, axis=-1, keepdims=True)]

    return call


def _dtype(x: Any) -> str:
    return keras.backend.standardize_dtype(x.dtype)


def _square(x: Any) -> Any:
    """Matrices that can be inverted: (rows, 6, 6), made of what is cut."""
    return ops.matmul(x, ops.transpose(x, (0, 2, 1))) + 3.0 * ops.eye(6, dtype=x.dtype)


def _matrix(function: Callable[[Any], Any]) -> Operation:
    return lambda x, t: function(_square(x))


def _image(x: Any) -> Any:
    """(rows, 6, 4, 2) of (rows, 6, 8)."""
    return ops.reshape(x, (-1, 6, 4, 2))


UNARY = """
abs absolute arctan arcsinh cbrt ceil celu cos cosh deg2rad elu erf erfc exp expm1 floor gelu
hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid negative
nan_to_num rad2deg relu relu6 round selu sigmoid sign silu sin sinc sinh soft_shrink softplus
softsign sparse_sigmoid square squareplus swish tan tanh tanh_shrink trunc real imag conj isfinite
isinf isnan isneginf isposinf isreal signbit logical_not zeros_like ones_like stop_gradient i0 copy
"""
POSITIVE = """
log log10 log1p log2 rsqrt sqrt reciprocal
"""
WITHIN = """
arccos arcsin arctanh erfinv
"""
PAIRS = """
add subtract multiply divide divide_no_nan maximum minimum arctan2 hypot logaddexp logaddexp2
heaviside copysign fmax fmin greater greater_equal less less_equal equal not_equal isclose
logical_and logical_or logical_xor floor_divide mod fmod nextafter true_divide
"""
REDUCED = """
sum mean max min prod std var any all logsumexp nansum nanmean nanmax nanmin nanprod nanstd nanvar
median amax amin
"""
ALONG = """
cumsum cumprod softmax log_softmax sort argsort argmax argmin diff flip nancumsum nancumprod
sparsemax
"""
MATRICES = """
cholesky det inv logdet slogdet pinv eigh qr svd trace diagonal tril triu transpose matrix_rank
"""


def _table() -> dict[str, Operation]:
    rows: dict[str, Operation] = {}
    for names, made in (
        (UNARY, _both),
        (POSITIVE, _positive),
        (WITHIN, _within),
        (PAIRS, _pair),
        (REDUCED, _reduced),
        (ALONG, _axes),
        (MATRICES, _matrix),
    ):
        for name in names.split():
            if hasattr(ops, name):
                rows[name] = made(getattr(ops, name))
    return rows


OPERATIONS: dict[str, Operation] = {
    **_table(),
    "add_whole_rows": lambda x, t: x + ops.reshape(ops.sum(t, 2), (-1, 1, 8)),
    "arccosh": _both(lambda x: ops.arccosh(ops.abs(x) + 1.5)),
    "average": _axes(ops.average),
    "count_nonzero": _axes(lambda x, axis: ops.count_nonzero(ops.relu(x), axis=axis)),
    "norm": _axes(ops.norm),
    "append": lambda x, t: [ops.append(x, x * 2, axis=2), ops.append(x, x * 2, axis=1)],
    "array_split": lambda x, t: [*ops.array_split(x, 3, axis=2), *ops.array_split(t, 3, axis=1)],
    "adaptive_average_pool": lambda x, t: ops.adaptive_average_pool(x, 3),
    "average_pool": lambda x, t: [ops.average_pool(x, 2), ops.average_pool(t, 2)],
    "max_pool": lambda x, t: [ops.max_pool(x, 2), ops.max_pool(t, 2, padding="same")],
    "batch_normalization": lambda x, t: ops.batch_normalization(
        x, ops.mean(x, (0, 1)), ops.var(x, (0, 1)) + 0.1, axis=-1
    ),
    "layer_normalization": lambda x, t: [
        ops.layer_normalization(x, axis=-1),
        ops.layer_normalization(t, axis=1),
    ],
    "rms_normalization": lambda x, t: [ops.rms_normalization(x), ops.rms_normalization(t, axis=1)],
    "normalize": lambda x, t: [ops.normalize(x, axis=-1), ops.normalize(t, axis=1, order=3)],
    "moments": lambda x, t: [*ops.moments(x, -1), *ops.moments(t, (1, 2))],
    "binary_crossentropy": lambda x, t: ops.binary_crossentropy(ops.sigmoid(x), ops.sigmoid(-x)),
    "categorical_crossentropy": lambda x, t: [
        ops.categorical_crossentropy(ops.softmax(-x), x, from_logits=True),
        ops.categorical_crossentropy(ops.softmax(-x), ops.softmax(x)),
    ],
    "sparse_categorical_crossentropy": lambda x, t: ops.sparse_categorical_crossentropy(
        ops.argmax(t, 1), x, from_logits=True
    ),
    "bincount": lambda x, t: ops.bincount(ops.argmax(x, -1), minlength=8),
    "broadcast_to": lambda x, t: ops.broadcast_to(x[:, :, None], (4, 6, 3, 8)),
    "cast": lambda x, t: ops.cast(ops.cast(3 * x, "int32"), x.dtype) * x,
    "cdist": lambda x, t: ops.cdist(x, ops.sin(x)),
    "clip": _both(lambda x: ops.clip(x, -0.3, 0.4)),
    "concatenate": lambda x, t: [ops.concatenate([x, ops.sin(x)], axis=a) for a in (0, 1, 2)],
    "concatenate_unlike": lambda x, t: ops.concatenate([x, ops.transpose(t, (0, 2, 1))], axis=2),
    "cond": lambda x, t: ops.cond(ops.sum(x) > 0, lambda: ops.sin(x), lambda: ops.cos(x)),
    "conv": lambda x, t: ops.conv(
        x, np.linspace(-1, 1, 3 * 8 * 4).reshape(3, 8, 4).astype(_dtype(x))
    ),
    "conv_middle": lambda x, t: ops.conv(
        t, np.linspace(-1, 1, 3 * 6 * 4).reshape(3, 6, 4).astype(_dtype(x)), padding="same"
    ),
    "cross": lambda x, t: ops.cross(x[..., :3], x[..., 5:]),
    "depth_to_space": lambda x, t: ops.depth_to_space(ops.reshape(x, (-1, 6, 2, 4)), 2),
    "space_to_depth": lambda x, t: ops.space_to_depth(_image(x), 2),
    "depthwise_conv": lambda x, t: ops.depthwise_conv(
        x, np.linspace(-1, 1, 24).reshape(3, 8, 1).astype(_dtype(x))
    ),
    "diag": lambda x, t: ops.diag(x[0, 0]),
    "diagflat": lambda x, t: ops.diagflat(x[0, :2]),
    "digitize": lambda x, t: ops.digitize(x, np.array([-0.5, 0.0, 0.5])),
    "dot": lambda x, t: ops.dot(x, ops.transpose(x[0])),
    "dot_product_attention": lambda x, t: ops.dot_product_attention(
        _image(x), _image(ops.sin(x)), _image(ops.cos(x)), is_causal=True
    ),
    "dstack": lambda x, t: ops.dstack([x, x * x]),
    "hstack": lambda x, t: ops.hstack([x, x * x]),
    "vstack": lambda x, t: ops.vstack([x, x * x]),
    "dsplit": lambda x, t: ops.dsplit(x, 2),
    "hsplit": lambda x, t: [*ops.hsplit(x, 2), *ops.hsplit(t, 2)],
    "vsplit": lambda x, t: ops.vsplit(x, 2),
    "einsum": lambda x, t: [
        ops.einsum("abc,acd->abd", x, t),
        ops.einsum("abc,adc->abd", x, ops.sin(x)),
        ops.einsum("abc->cba", x),
        ops.einsum("abc,abd->acd", x, x),
        ops.einsum("abc,c->ab", x, ops.sum(t, (0, 2))),
    ],
    "expand_dims": lambda x, t: [ops.expand_dims(x, a) for a in (0, 1, -1)],
    "extract_sequences": lambda x, t: ops.extract_sequences(ops.transpose(t, (0, 2, 1)), 4, 2),
    "fft": lambda x, t: list(ops.fft((x, ops.sin(x)))),
    "rfft": lambda x, t: list(ops.rfft(x)),
    "irfft": lambda x, t: ops.irfft((x, ops.sin(x))),
    "stft": lambda x, t: list(ops.stft(x, 4, 2, 4)),
    "fliplr": _both(lambda x: ops.fliplr(x)),
    "flipud": _both(lambda x: ops.flipud(x)),
    "fori_loop": lambda x, t: ops.fori_loop(0, 3, lambda i, v: ops.sin(v) + v[:, ::-1], x),
    "fold_unfold": lambda x, t: ops.unfold(ops.reshape(x, (-1, 2, 6, 4)), 2),
    "full_like": lambda x, t: ops.full_like(x, 2.0) * x,
    "gcd": _int_pair(ops.gcd),
    "lcm": _int_pair(ops.lcm),
    "bitwise_and": _int_pair(ops.bitwise_and),
    "bitwise_or": _int_pair(ops.bitwise_or),
    "bitwise_xor": _int_pair(ops.bitwise_xor),
    "left_shift": _int_pair(lambda a, b: ops.left_shift(a, ops.minimum(b, 3))),
    "right_shift": _int_pair(lambda a, b: ops.right_shift(a, ops.minimum(b, 3))),
    "bitwise_not": _ints(ops.bitwise_not),
    "get_item": lambda x, t: [
        x[:, 1:3],
        x[..., 2:6],
        x[..., ::2],
        x[:, None, :, 3],
        x[:, -1],
        t[:, 2:5],
        t[:, -1],
        x[..., -3:],
    ],
    "get_item_backwards": lambda x, t: [x[..., ::-1], t[:, ::-1], x[::-1]],
    "glu": lambda x, t: [ops.glu(x), ops.glu(t, axis=1)],
    "histogram": lambda x, t: ops.histogram(ops.stop_gradient(ops.ravel(x)), 5, (-1.0, 1.0))[0],
    "in_top_k": lambda x, t: ops.in_top_k(
        ops.argmax(ops.reshape(ops.cast(t, "float32"), (24, 8)), -1),
        ops.reshape(ops.cast(x, "float32"), (24, 8)),
        3,
    ),
    "inner": lambda x, t: ops.inner(x[0], x[1]),
    "ldexp": lambda x, t: ops.ldexp(x, ops.ones((8,), "int32")),
    "linspace": lambda x, t: ops.linspace(x, ops.sin(x), 3),
    "logspace": lambda x, t: ops.logspace(x, ops.sin(x), 3),
    "geomspace": lambda x, t: ops.geomspace(ops.abs(x) + 1, ops.abs(x) + 2, 3),
    "lstsq": lambda x, t: ops.lstsq(_square(x)[0], x[0]),
    "map": lambda x, t: ops.map(lambda row: ops.sin(row) * ops.sum(row), x),
    "map_middle": lambda x, t: ops.map(lambda row: ops.cumsum(row, 1), ops.transpose(t, (1, 0, 2))),
    "matmul": lambda x, t: [
        ops.matmul(x, t),
        ops.matmul(t, x),
        ops.matmul(x, ops.transpose(x[0])),
        ops.matmul(x, ops.ones((8, 3), x.dtype)),
    ],
    "meshgrid": lambda x, t: ops.meshgrid(x[0, 0], t[0, 0]),
    "moveaxis": lambda x, t: [ops.moveaxis(x, 2, 0), ops.moveaxis(t, 1, 2)],
    "multi_hot": lambda x, t: ops.multi_hot(ops.argmax(x, -1), 8),
    "one_hot": lambda x, t: [ops.one_hot(ops.argmax(x, -1), 8), ops.one_hot(ops.argmax(x, 1), 6)],
    "outer": lambda x, t: ops.outer(x[0, 0], t[0, 0]),
    "pad": lambda x, t: [
        ops.pad(x, [[0, 0], [1, 2], [2, 1]]),
        ops.pad(x, [[0, 0], [0, 0], [1, 1]], mode="reflect"),
        ops.pad(t, [[0, 0], [1, 1], [0, 0]], mode="symmetric"),
    ],
    "percentile": lambda x, t: ops.percentile(x, 30.0, axis=-1),
    "quantile": lambda x, t: [ops.quantile(x, 0.3, axis=-1), ops.quantile(t, [0.2, 0.6], axis=1)],
    "polar": lambda x, t: ops.real(
        ops.polar(ops.cast(ops.abs(x), "float32"), ops.cast(x, "float32"))
    ),
    "power": lambda x, t: [ops.power(ops.abs(x) + 0.1, 1.7), ops.power(x, 2)],
    "ptp": _axes(ops.ptp) if hasattr(ops, "ptp") else _both(ops.abs),
    "ravel": lambda x, t: [ops.ravel(x), ops.ravel(t)],
    "rearrange": lambda x, t: (
        ops.rearrange(x, "b s (h d) -> b h s d", h=2) if hasattr(ops, "rearrange") else x
    ),
    "repeat": lambda x, t: [ops.repeat(x, 2, axis=a) for a in (0, 1, 2)],
    "reshape": lambda x, t: [
        ops.reshape(x, (-1, 48)),
        ops.reshape(x, (-1, 6, 2, 4)),
        ops.reshape(x, (-1, 6, 4, 2)),
        ops.reshape(t, (-1, 8, 2, 3)),
        ops.reshape(t, (-1, 16, 3)),
        ops.reshape(x, (-1, 2)),
        ops.reshape(x, (4, 3, 16)),
    ],
    "roll": lambda x, t: [ops.roll(x, 3, axis=2), ops.roll(t, 1, axis=1), ops.roll(x, 2)],
    "rot90": lambda x, t: ops.rot90(x, axes=(1, 2)),
    "saturate_cast": lambda x, t: ops.saturate_cast(x * 400, "int8"),
    "scan": lambda x, t: ops.scan(lambda c, v: (ops.tanh(c + v), c * v), x[0], x)[1],
    "scan_middle": lambda x, t: ops.scan(
        lambda c, v: (ops.tanh(c + v), c * v), t[:, 0], ops.transpose(t, (1, 0, 2))
    )[1],
    "scatter": lambda x, t: ops.scatter(np.array([[1], [3]]), x[0, :2], (5, 8)),
    "scatter_update": lambda x, t: ops.scatter_update(x[0], np.array([[1], [3]]), 2 * x[1, :2]),
    "searchsorted": lambda x, t: ops.searchsorted(np.linspace(-1, 1, 7), x[0, 0]),
    "segment_sum": lambda x, t: ops.segment_sum(
        ops.transpose(x, (2, 0, 1)), np.array([0, 0, 1, 1, 1, 2, 2, 3]), 4
    ),
    "segment_max": lambda x, t: ops.segment_max(
        ops.transpose(x, (2, 0, 1)), np.array([0, 0, 1, 1, 1, 2, 2, 3]), 4
    ),
    "select": lambda x, t: ops.select([x > 0.5, x > 0], [x, 2 * x], 0.0),
    "shape": lambda x, t: x * ops.cast(ops.shape(x)[2], x.dtype),
    "slice": lambda x, t: [ops.slice(x, (0, 1, 3), (4, 3, 4)), ops.slice(t, (0, 3, 0), (4, 3, 6))],
    "solve": lambda x, t: ops.solve(_square(x), x),
    "solve_triangular": lambda x, t: ops.solve_triangular(_square(x), x, lower=True),
    "split": lambda x, t: [*ops.split(x, 4, axis=2), *ops.split(t, [3, 5], axis=1)],
    "squeeze": lambda x, t: ops.squeeze(x[:, :1]),
    "stack": lambda x, t: [ops.stack([x, ops.sin(x)], axis=a) for a in (0, 1, 2, 3)],
    "swapaxes": lambda x, t: [ops.swapaxes(x, 1, 2), ops.swapaxes(t, 0, 1)],
    "switch": lambda x, t: ops.switch(ops.cast(ops.sum(x) > 0, "int32"), [ops.sin, ops.cos], x),
    "take": lambda x, t: [
        ops.take(x, np.array([3, 1, 5, 5]), axis=2),
        ops.take(t, np.array([7, 0]), axis=1),
        ops.take(x, np.array([2, 0]), axis=1),
        ops.take(x, ops.argmax(t[0], 0), axis=2),
    ],
    "take_along_axis": lambda x, t: [
        ops.take_along_axis(x, ops.argsort(x, axis=-1)[..., :3], axis=-1),
        ops.take_along_axis(t, ops.argmax(t, axis=1, keepdims=True), axis=1),
    ],
    "tensordot": lambda x, t: [
        ops.tensordot(x, t[0], axes=[[2], [0]]),
        ops.tensordot(x, x, axes=[[0, 1], [0, 1]]),
    ],
    "threshold": _both(lambda x: ops.threshold(x, 0.2, -1.0)),
    "tile": lambda x, t: [ops.tile(x, (1, 1, 2)), ops.tile(t, (1, 2, 1)), ops.tile(x, (2, 1, 1))],
    "top_k": lambda x, t: [ops.top_k(x, 3)[0], *ops.top_k(ops.transpose(t, (0, 2, 1)), 2)],
    "transpose_all": lambda x, t: [ops.transpose(x), ops.transpose(t, (1, 2, 0))],
    "trapezoid": _axes(ops.trapezoid) if hasattr(ops, "trapezoid") else _both(ops.abs),
    "tri_mask": lambda x, t: ops.where(ops.tri(6, 8, dtype="bool"), x, -1.0),
    "unstack": lambda x, t: [*ops.unstack(x, axis=2), *ops.unstack(t, axis=1)],
    "vander": lambda x, t: ops.vander(x[0, 0], 3),
    "vdot": lambda x, t: ops.vdot(x, ops.sin(x)),
    "vectorized_map": lambda x, t: ops.vectorized_map(lambda row: row * ops.sum(row), x),
    "where": lambda x, t: [
        ops.where(x > 0, x, ops.transpose(t, (0, 2, 1))),
        ops.where(ops.arange(8) > 3, x, 0.0),
    ],
    "while_loop": lambda x, t: ops.while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, ops.sin(v) * 2), (0, x)
    )[1],
    "arange_positions": lambda x, t: x + ops.cast(ops.arange(ops.shape(x)[2]), x.dtype),
    "argmax_gather": lambda x, t: ops.take(t, ops.argmax(x[0], -1), axis=1),
}
"""Name -> operation."""
