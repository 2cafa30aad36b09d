"""Functions of a batch, by what they do to its rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

RNG = np.random.default_rng(0)
WRITTEN = tf.Variable(tf.zeros((4,)))
SQUARE = RNG.normal(size=(4, 4)).astype("float32")


def filtered(x: Any, **options: Any) -> Any:
    kernel = np.ones((3, 3, x.shape[-1], 2), "float32")
    return tf.nn.conv2d(x, kernel, 1, "SAME", **options)


def across(x: Any, function: Callable) -> Any:
    """Of three words of a row, with words in the first dim."""
    words = ops.stack([x, 2 * x, 3 * x], axis=1)
    return ops.transpose(function(ops.transpose(words, (1, 0, 2))), (1, 0, 2))


def matrices(x: Any) -> Any:
    """One of each row, which has an inverse."""
    return ops.reshape(x, (-1, 2, 2)) + 9.0 * np.eye(2, dtype="float32")


def whole(x: Any) -> Any:
    """Numbers from 0 to 3."""
    return ops.cast(ops.clip(ops.abs(x), 0, 3), "int32")


ROW_BY_ROW: dict[str, Any] = {
    "square": lambda x: x * x + 1.0,
    "softmax of features": lambda x: ops.softmax(x, axis=-1),
    "softmax of words": lambda x: ops.softmax(ops.reshape(x, (-1, 2, 2)), axis=1),
    "sums of words": lambda x: across(x, lambda t: ops.segment_sum(t, np.array([0, 0, 1]), 2)),
    "largest words": lambda x: across(x, lambda t: tf.math.unsorted_segment_max(t, [0, 0, 1], 2)),
    "solved": lambda x: tf.linalg.solve(matrices(x), matrices(x) * 2.0),
    "triangles solved": lambda x: tf.linalg.triangular_solve(matrices(x), matrices(x) + 1.0),
    "counts": lambda x: keras.layers.CategoryEncoding(4, output_mode="count")(whole(x)),
    "numbers that are there": lambda x: keras.layers.CategoryEncoding(4)(whole(x)),
    "log of softmax of words": lambda x: ops.log_softmax(ops.reshape(x, (-1, 2, 2)), axis=1),
    "standardised features": lambda x: (x - ops.mean(x, -1, True)) / ops.std(x, -1, keepdims=True),
    "matrix product": lambda x: x @ SQUARE,
    "weights first": lambda x: ops.transpose(SQUARE @ ops.transpose(x)),
    "a bias of every feature": lambda x: x + SQUARE[0],
    "reshape and back": lambda x: ops.reshape(ops.reshape(x, (-1, 2)) * 2, (-1, 4)),
    "transpose and back": lambda x: ops.transpose(ops.exp(ops.transpose(x))),
    "cross": lambda x: ops.cross(x[:, :3], SQUARE[0, 1:]),
    "words back to front": lambda x: tf.reverse_sequence(x, whole(x)[:, 0], 1, 0),
    "words back to front, alike": lambda x: tf.reverse_sequence(
        x, ops.full(x.shape[:1], 2, "int32"), 1, 0
    ),
    "a gradient of its own": lambda x: tf.gradients(ops.sum(ops.sigmoid(ops.tanh(x))), x)[0],
    "noise through a layer": lambda x: (
        x * tf.nn.bias_add(keras.random.normal(x.shape, seed=1) @ SQUARE, SQUARE[0])
    ),
    "noise that is solved": lambda x: (
        matrices(x)
        @ tf.linalg.solve(
            matrices(keras.random.normal(x.shape, seed=1)), matrices(ops.ones(x.shape))
        )
    ),
    "what is learned, for each row": lambda x: (
        ops.reshape(ops.tile(SQUARE[None], (x.shape[0], 1, 1)), (-1, 4)) @ SQUARE
    ),
    "tile and cut": lambda x: ops.split(ops.tile(x, (3, 1)), 3)[1],
    "repeat and mean": lambda x: ops.mean(ops.reshape(ops.repeat(x, 3, 0), (-1, 3, 4)), 1),
    "two batches joined and parted": lambda x: ops.split(ops.concatenate([x, 2 * x]), 2)[0],
    "stacked": lambda x: ops.stack([x, x], axis=1),
    "unstacked": lambda x: ops.unstack(x, axis=1)[2],
    "slice of features": lambda x: x[:, 1:3],
    "feature": lambda x: x[..., 2],
    "some features": lambda x: tf.slice(x, [0, 1], [-1, 2]),
    "new dim": lambda x: x[:, None],
    "reversed features": lambda x: x[:, ::-1],
    "rolled features": lambda x: ops.roll(x, 1, axis=1),
    "sum of earlier features": lambda x: ops.cumsum(x, axis=1),
    "sorted features": lambda x: ops.sort(x, axis=1),
    "best feature": lambda x: ops.argmax(x, axis=1),
    "best features": lambda x: ops.top_k(x, 2)[0],
    "one hot": lambda x: ops.one_hot(ops.argmax(x, axis=1), 4),
    "look-up": lambda x: ops.take(SQUARE, ops.argmax(x, axis=1), axis=0),
    "look-up in the row": lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    "chosen features": lambda x: ops.take(x, [0, 2], axis=1),
    "padded": lambda x: ops.pad(x, ((0, 0), (1, 2))),
    "where": lambda x: ops.where(x > 0, x, 0.0),
    "where of the row": lambda x: ops.where(ops.sum(x, 1, True) > 0, x, -x),
    "noise": lambda x: x + keras.random.normal(ops.shape(x)),
    "dropout": lambda x: tf.nn.dropout(x, 0.5),
    "depth dropout": lambda x: x * keras.random.uniform((ops.shape(x)[0], 1)),
    "zeros of the batch": lambda x: x + ops.zeros((ops.shape(x)[0], 4)),
    "positions": lambda x: x + ops.cast(ops.arange(4), "float32"),
    "positions for all rows": lambda x: (
        x + ops.broadcast_to(ops.cast(ops.arange(4), "float32"), ops.shape(x))
    ),
    "einsum with weights": lambda x: ops.einsum("bi,ij->bj", x, SQUARE),
    "outer product in the row": lambda x: ops.einsum("bi,bj->bij", x, x),
    "product in the row": lambda x: ops.einsum("...i,...i->...", x, x),
    "jax-like map": lambda x: ops.vectorized_map(lambda r: r * 2, x),
    "jax-like map of sums": lambda x: ops.vectorized_map(lambda r: ops.sum(r * r), x),
    "branch by a constant": lambda x: ops.cond(SQUARE[0, 0] > 0, lambda: x, lambda: x * 2),
    "loop over features": lambda x: ops.fori_loop(0, 4, lambda i, s: s + x[:, i], x[:, 0] * 0),
    "scan over features": lambda x: ops.scan(
        lambda c, r: (c + r, c * r), ops.zeros_like(x[:, 0]), ops.transpose(x)
    )[0],
    "function": lambda x: tf.function(lambda t: t * 2)(x),
    "own gradient": tf.custom_gradient(lambda x: (x * 2, lambda g: g)),
    "size of the batch cancelled": lambda x: x / ops.shape(x)[0] * ops.shape(x)[0],
    "matrix of the row": lambda x: tf.linalg.inv(ops.einsum("bi,bj->bij", x, x)),
    "shape of what has met": lambda x: x + ops.zeros_like(x - ops.mean(x)),
}
MEANS: dict[str, Any] = {
    "mean": lambda x: ops.mean(ops.square(x)),
    "mean per feature": lambda x: ops.mean(x, axis=0),
    "mean of a sum": lambda x: ops.mean(ops.sum(ops.square(x), axis=1)),
    "sum by the batch's size": lambda x: ops.sum(ops.square(x)) / ops.shape(x)[0],
    "by its size in the graph": lambda x: ops.sum(x) / ops.cast(tf.shape(x)[0], "float32"),
    "by the number of elements": lambda x: ops.sum(x) / ops.cast(tf.size(x), "float32"),
    "rows by the batch's size": lambda x: ops.sum(ops.square(x) / ops.shape(x)[0]),
    "times its inverse": lambda x: ops.sum(x) * (1 / ops.shape(x)[0]),
    "scaled and moved": lambda x: 0.1 * ops.mean(x, 0) - 3.0,
    "weighted features": lambda x: ops.mean(x, axis=0, keepdims=True) @ SQUARE,
    "two means": lambda x: ops.mean(x) + ops.mean(ops.exp(x)),
    "means stacked": lambda x: ops.stack([ops.mean(x), ops.mean(x * x), 0.5]),
    "mean outer product": lambda x: ops.transpose(x) @ x / ops.shape(x)[0],
    "a loss": lambda x: keras.losses.MeanSquaredError()(x, ops.exp(x)),
    "mean over tokens": lambda x: ops.mean(ops.reshape(x, (-1, 2)), axis=0),
    "mean in a loop": lambda x: ops.fori_loop(0, 4, lambda i, s: s + ops.mean(x[:, i]), 0.0),
}
SUMS: dict[str, Any] = {
    "sum": ops.sum,
    "sum of features by row": lambda x: ops.sum(x, axis=0),
    "outer products": lambda x: ops.transpose(x) @ x,
    "weighted": lambda x: 0.1 * ops.sum(ops.square(x)),
    "mean times the batch's size": lambda x: ops.mean(x) * ops.shape(x)[0],
    "half the squares": tf.nn.l2_loss,
    "no start": lambda x: sum([ops.sum(x), ops.sum(x * x)]),
}
MIXED: dict[str, Any] = {
    "centred": lambda x: x - ops.mean(x, axis=0),
    "deviation": lambda x: ops.std(x, axis=0),
    "sums of rows by number": lambda x: ops.segment_sum(x, ops.arange(ops.shape(x)[0]) % 2, 2),
    "solved across rows": lambda x: tf.linalg.solve(ops.transpose(x) @ x + 9.0 * SQUARE, SQUARE),
    "counts as far as the largest": lambda x: tf.math.bincount(whole(x), axis=-1),
    "softmax over rows": lambda x: ops.softmax(x, axis=0),
    "rolled": lambda x: ops.roll(x, 1, axis=0),
    "rolled flat": lambda x: ops.roll(x, 1),
    "reversed": lambda x: x[::-1],
    "shuffled": tf.random.shuffle,
    "permuted": lambda x: ops.take(x, ops.argsort(keras.random.uniform((x.shape[0],))), axis=0),
    "earlier rows": lambda x: ops.cumsum(x, axis=0),
    "row 0": lambda x: x[0],
    "all but row 0": lambda x: x[1:],
    "half of the batch": lambda x: ops.split(x[: x.shape[0] // 2 * 2], 2)[0],
    "similarities": lambda x: x @ ops.transpose(x),
    "distances": lambda x: ops.sum(ops.square(x[:, None] - x[None]), -1),
    "all pairs": lambda x: ops.sum(ops.exp(x[:, None] - x[None]), axis=0),
    "all pairs, other rows": lambda x: ops.sum(ops.exp(x[:, None] - x[None]), axis=1),
    "some rows": lambda x: tf.slice(x, [1, 0], [x.shape[0] - 1, 4]),
    "largest": lambda x: ops.max(x, axis=0),
    "any": lambda x: ops.any(x > 0),
    "product of means": lambda x: ops.mean(x) * ops.mean(x),
    "root of a mean": lambda x: ops.sqrt(ops.mean(x)),
    "mean over a mask": lambda x: (
        ops.sum(ops.where(x > 0, x, 0.0)) / ops.sum(ops.cast(x > 0, "float32"))
    ),
    "sum and a constant": lambda x: ops.sum(x) + 1.0,
    "sum and a mean": lambda x: ops.sum(x) + ops.mean(x),
    "sorted rows": lambda x: ops.sort(x, axis=0),
    "position in the batch": lambda x: x * ops.cast(ops.arange(x.shape[0]), "float32")[:, None],
    "rows by the batch's size": lambda x: x / ops.shape(x)[0],
    "batch and its size": lambda x: x + ops.shape(x)[0],
    "the batch elsewhere": ops.transpose,
    "two batches": lambda x: ops.concatenate([x, x]),
    "branch by the batch": lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: 2 * x),
    "loop by the batch": lambda x: ops.while_loop(
        lambda t: ops.sum(t) < 9, lambda t: (t + 1.0,), (x,)
    )[0],
    "loop over rows": lambda x: tf.scan(lambda before, row: before + row, x),
    "distinct": lambda x: tf.unique(ops.reshape(x, (-1,)))[1],
    "segments": lambda x: ops.segment_sum(x, ops.argmax(x, axis=1), num_segments=4),
    "pads rows": lambda x: ops.pad(x, ((1, 0), (0, 0)))[:-1],
    "a row decides": lambda x: ops.take(x, ops.argmax(x, axis=0), axis=1),
    "written and read": lambda x: _written_and_read(x),
    "written in a function": lambda x: _written_in_a_function(x),
    "positions collected in a loop": lambda x: (
        x + tf.map_fn(lambda i: i, tf.range(x.shape[0], dtype="float32"))[:, None]
    ),
    "cross over rows": lambda x: ops.cross(ops.transpose(x[:3]), SQUARE[:, 1:]),
    "rows back to front": lambda x: ops.transpose(
        tf.reverse_sequence(ops.transpose(x), [2, 3, 1, 2], 1, 0)
    ),
    "lengths by position": lambda x: tf.reverse_sequence(x, ops.arange(x.shape[0]) % 4, 1, 0),
    "gradient through a mean": lambda x: tf.gradients(ops.exp(ops.mean(ops.tanh(x))), x)[0],
    "what differs in the batch, flat": lambda x: (
        x + ops.reshape(ops.arange(4.0 * x.shape[0]), (-1, 4))
    ),
    "one image of many rows": lambda x: tf.image.adjust_contrast(x[:, :, None], 2.0)[:, :, 0],
}


def _written_and_read(x: Any) -> Any:
    WRITTEN.assign(ops.mean(x, axis=0))
    return x - WRITTEN


def _written_in_a_function(x: Any) -> Any:
    @tf.function(autograph=False)
    def write(t: Any) -> None:
        WRITTEN.assign(ops.mean(t, axis=0))

    write(x)
    return x - WRITTEN
