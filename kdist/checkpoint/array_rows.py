"""Rows of arrays in memory, dense, ragged or sparse, by their numbers."""

from __future__ import annotations

from typing import Any

from kdist.checkpoint.manifest import CheckpointError

import keras
import numpy as np
import tensorflow as tf


def as_array(value: Any) -> Any:
    """An array as Keras feeds it: on the host, floats in Keras's floatx.

    Args:
        value: An array, a tensor, also ragged or sparse, or a sparse matrix of SciPy.

    Returns:
        A tensor, a ragged tensor, or `SparseRows`.

    Raises:
        CheckpointError: It is of Python objects.
    """
    with tf.device("CPU:0"):
        if hasattr(value, "tocoo"):
            value = value.tocoo()
            where = np.stack([value.row, value.col], axis=1).astype(np.int64)
            value = tf.SparseTensor(where, value.data, value.shape)
        if isinstance(value, tf.SparseTensor):
            return SparseRows(value)
        if isinstance(value, tf.RaggedTensor):
            value = tf.identity(value)
        elif not isinstance(value, tf.Tensor):
            value = tf.convert_to_tensor(_numbers_or_texts(value))
        return _in_floatx(value)


def _numbers_or_texts(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype != object or all(isinstance(one, str) for one in array.flat):
        return array
    raise CheckpointError(
        "Data of Python objects has no positions. Make arrays, or a tf.data.Dataset, of it. "
        f"Received: an array of dtype object and shape {array.shape}"
    )


def _in_floatx(value: Any) -> Any:
    return tf.cast(value, keras.config.floatx()) if value.dtype.is_floating else value


class SparseRows:
    """The rows of a sparse tensor, which TensorFlow itself does not gather.

    Args:
        sparse: On the device in scope.

    Attributes:
        shape: Of the dense tensor.
        dtype: Of its elements.
    """

    def __init__(self, sparse: tf.SparseTensor) -> None:
        sparse = tf.sparse.reorder(sparse)
        self.shape = sparse.shape
        self._indices, self._values = sparse.indices, _in_floatx(sparse.values)
        self.dtype = self._values.dtype
        # Of each row, where its values are.
        self._places = tf.RaggedTensor.from_value_rowids(
            tf.range(tf.size(self._values, tf.int64)), self._indices[:, 0], self.shape[0]
        )

    def rows(self, numbers: Any) -> tf.SparseTensor:
        """Some rows, as a sparse tensor."""
        places = tf.gather(self._places, numbers)
        within = tf.gather(self._indices, places.flat_values)[:, 1:]
        where = tf.concat([places.value_rowids()[:, None], within], axis=1)
        values = tf.gather(self._values, places.flat_values)
        count = tf.size(numbers, tf.int64)
        return tf.SparseTensor(where, values, [count, *self.shape[1:]])


def gathered(array: Any, numbers: Any) -> Any:
    """Rows of what `as_array` gave."""
    if isinstance(array, SparseRows):
        return array.rows(numbers)
    return tf.gather(array, numbers)


def between(array: Any, start: int, stop: int) -> Any:
    """Rows of what `as_array` gave that follow each other."""
    if isinstance(array, SparseRows):
        return array.rows(np.arange(start, stop))
    return array[start:stop]


def spec_of(array: Any) -> keras.KerasTensor:
    """A symbolic batch of what `as_array` gave."""
    sparse = isinstance(array, SparseRows)
    return keras.KerasTensor((None, *array.shape[1:]), array.dtype.name, sparse=sparse)


def none_of(batch: Any) -> Any:
    """A batch without rows."""
    if isinstance(batch, tf.SparseTensor):
        shape = batch.shape.as_list()
        return tf.sparse.slice(batch, [0] * len(shape), [0, *shape[1:]])
    return batch[:0]
