"""Rows of arrays of every kind are those of the dense array."""

from __future__ import annotations

import kdist
from kdist.checkpoint.array_rows import as_array, between, gathered, none_of, spec_of

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

DENSE = np.where(np.random.default_rng(0).random((7, 4)) < 0.4, 0.0, 1.5) * np.arange(1, 5)
CUBE = np.where(np.random.default_rng(1).random((5, 3, 2)) < 0.5, 0, 3)


def shuffled(sparse):
    """Values in no order."""
    order = np.random.default_rng(2).permutation(sparse.values.shape[0])
    where, values = sparse.indices.numpy()[order], sparse.values.numpy()[order]
    return tf.SparseTensor(where, values, sparse.dense_shape)


@pytest.mark.parametrize(
    ("value", "dense"),
    [
        (DENSE, DENSE),
        (DENSE.tolist(), DENSE),
        (tf.constant(DENSE), DENSE),
        (scipy.sparse.csr_matrix(DENSE), DENSE),
        (scipy.sparse.coo_array(DENSE), DENSE),
        (shuffled(tf.sparse.from_dense(DENSE)), DENSE),
        (tf.sparse.from_dense(CUBE), CUBE),
        (np.array([["a", "b"], ["c", "d"]], object), np.array([[b"a", b"b"], [b"c", b"d"]])),
    ],
    ids=["array", "list", "tensor", "csr", "coo", "unordered", "cube", "texts"],
)
def test_rows(value, dense):
    def check(rows, expected):
        found = tf.sparse.to_dense(rows) if isinstance(rows, tf.SparseTensor) else rows
        np.testing.assert_array_equal(found, expected)

    array = as_array(value)
    numbers = np.array([len(dense) - 1, 0, 1, 0])
    check(gathered(array, numbers), dense[numbers])
    check(gathered(array, numbers[:0]), dense[:0])
    check(between(array, 1, len(dense)), dense[1:])
    check(none_of(between(array, 1, len(dense))), dense[:0])
    spec = spec_of(array)
    assert spec.shape == (None, *dense.shape[1:])
    batches = tf.data.Dataset.from_tensors(numbers).map(lambda n: gathered(array, n))
    assert batches.element_spec.shape[1:] == dense.shape[1:]
    if dense.dtype == np.float64:
        assert spec.dtype == "float32"


def test_objects_are_refused():
    with pytest.raises(kdist.checkpoint.CheckpointError, match="Python objects"):
        as_array(np.array([{}, 1], object))
