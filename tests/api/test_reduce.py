"""`kdist.reduce` equals the function's own call on the whole batch."""

from __future__ import annotations

from typing import Any

import kdist

import numpy as np
import pytest
import tensorflow as tf

from ..parity import MESHES, assert_close, both_meshes, data, pair

pytestmark = pytest.mark.usefixtures("float64")


@both_meshes
@pytest.mark.parametrize("rows", [8, 5, 2, 1])
def test_reduce_means_and_sums_over_rows(axes, rows):
    _, parallel = pair(axes)
    a, b = data(rows)[0], data(rows, seed=1)[0]

    def mean(a: Any, b: Any) -> dict:
        return {"error": tf.reduce_mean(tf.abs(a - b)), "per": tf.reduce_mean(a, axis=0)}

    found = kdist.reduce(parallel, mean, a, b)
    assert_close({"error": np.abs(a - b).mean(), "per": a.mean(axis=0)}, found)
    total = kdist.reduce(parallel, lambda t: tf.reduce_sum(t, axis=0), a, op="sum")
    assert_close(a.sum(axis=0), total)


@both_meshes
def test_reduce_takes_structures_and_integers(axes):
    _, parallel = pair(axes)
    labels = np.array([0, 1, 1, 2, 2, 2])

    def count(batch: dict) -> Any:
        return tf.math.bincount(batch["labels"], minlength=3)

    found = kdist.reduce(parallel, count, {"labels": labels}, op="sum")
    assert np.asarray(found).tolist() == [1, 2, 3]


def test_reduce_runs_on_every_replicas_device():
    _, parallel = pair(MESHES[0])
    devices = []
    kdist.reduce(parallel, lambda t: devices.append(tf.identity(t).device) or t[0], np.ones(8))
    assert [d.rsplit(":", 1)[1] for d in devices] == ["0", "1", "2", "3"]


def test_another_op_is_refused():
    _, parallel = pair(MESHES[0])
    with pytest.raises(ValueError, match=r"Received: op='max'"):
        kdist.reduce(parallel, tf.reduce_max, np.ones(4), op="max")
