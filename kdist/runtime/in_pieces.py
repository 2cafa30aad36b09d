"""A batch of any number of rows, by programs for a few numbers of rows, piece by piece."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

PIECES = (64, 8, 1)
"""Rows of a piece, for each part that a batch is cut into: pieces are as large as rows are left,
and none but the last has copies of rows in it. More numbers are more programs in a file."""


def in_pieces(programs: Mapping[int, Callable], shapes: Sequence[Any]) -> Callable:
    """A function of any number of rows, each of whose results follows from its row alone.

    Args:
        programs: By number of rows, what computes as many.
        shapes: Of the arguments; dim 0 of None is the rows.
    """
    sizes = sorted(programs, reverse=True)
    first = next(n for n, shape in enumerate(shapes) if shape and shape[0] is None)

    def call(*tensors: Any) -> Any:
        rows = tf.shape(tensors[first])[0]

        def piece(size: int, start: Any) -> list[Any]:
            there = tf.minimum(tf.range(size) + start, rows - 1)  # the last one again, if need be
            given = [
                tf.gather(one, there) if shape and shape[0] is None else one
                for one, shape in zip(tensors, shapes, strict=True)
            ]
            return [one[: rows - start] for one in tf.nest.flatten(programs[size](*given))]

        def body(i: Any, start: Any, *done: Any) -> Any:
            left = tf.maximum(rows - start, sizes[-1])
            which = tf.math.count_nonzero(tf.constant(sizes) > left, dtype=tf.int32)
            branches = [functools.partial(piece, size, start) for size in sizes]
            found = tf.switch_case(which, branches)
            written = [array.write(i, one) for array, one in zip(done, found, strict=True)]
            return (i + 1, start + tf.gather(sizes, which), *written)

        results = programs[sizes[-1]].structured_outputs  # type: ignore[attr-defined]
        zero = tf.constant(0)
        start = (zero, zero, *map(_rows_to_come, tf.nest.flatten(results)))
        done = tf.while_loop(lambda i, start, *_: start < rows, body, start, parallel_iterations=1)[
            2:
        ]
        return tf.nest.pack_sequence_as(results, [one.concat() for one in done])

    return call


def _rows_to_come(like: Any) -> tf.TensorArray:
    """What pieces are written to, each of any number of rows."""
    shape = [None, *like.shape[1:]]
    return tf.TensorArray(like.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=shape)
