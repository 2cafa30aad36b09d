"""`send` and `recv` as calls of their own, within a process; across: `test_processes.py`."""

from __future__ import annotations

import kdist
from kdist import comm

import numpy as np
import pytest
import tensorflow as tf

from .test_counts import BLOCK, watched


def shifted(xs):
    """Each rank's value at the next one, and its square after it."""
    mesh, pairs = kdist.mesh(data=len(xs)), [(r, (r + 1) % len(xs)) for r in range(len(xs))]
    comm.send(xs, mesh, "data", pairs=pairs)
    comm.send([x**2 for x in xs], mesh, "data", pairs=pairs)
    return comm.recv(None, mesh, "data", pairs=pairs), comm.recv(None, mesh, "data", pairs=pairs)


@pytest.mark.parametrize("traced", [False, True])
def test_values_arrive_in_order_and_gradients_go_back(traced):
    xs = [tf.constant([r + 1.0, 2.0], tf.float64) for r in range(3)]

    def program(*xs):
        with tf.GradientTape() as tape:
            tape.watch(xs)
            first, second = shifted(list(xs))
            loss = tf.add_n(
                [tf.reduce_sum(a * b) * (r + 1) for r, (a, b) in enumerate(zip(first, second))]
            )
        return first, second, tape.gradient(loss, list(xs))

    first, second, grads = (tf.function(program, autograph=False) if traced else program)(*xs)
    for rank in range(3):
        np.testing.assert_array_equal(first[rank], xs[rank - 1])
        np.testing.assert_array_equal(second[rank], xs[rank - 1] ** 2)
        np.testing.assert_allclose(grads[rank - 1], 3 * xs[rank - 1] ** 2 * (rank + 1))


def test_one_message_there_and_one_back():
    def call(given, mesh):
        with tf.GradientTape() as tape:
            tape.watch(given[0])
            comm.send(given, mesh, "data", pairs=[(0, 2)])
            got = comm.recv(None, mesh, "data", pairs=[(0, 2)])
        with tf.device("CPU:2"):
            weight = 2.0 * got[2]
        return [tape.gradient(got[2], given[0], output_gradients=weight), None, weight]

    _, sent = watched(3, call)
    assert sent == {(0, 2, 3 * BLOCK * 4): 1, (2, 0, 3 * BLOCK * 4): 1}


def test_what_does_not_fit_is_refused():
    mesh, x = kdist.mesh(data=2), tf.constant([1.0])
    with pytest.raises(ValueError, match=r"send comes before its recv.*Received: nothing sent"):
        comm.recv(None, mesh, "data", pairs=[(1, 0)])
    with pytest.raises(ValueError, match=r"tensor of every source. Received: value=None"):
        comm.send([None, x], mesh, "data", pairs=[(0, 1)])
    with pytest.raises(ValueError, match=r"list of 2 values.*Received"):
        comm.send([x], mesh, "data", pairs=[(0, 1)])
    with pytest.raises(ValueError, match=r"In one send a rank sends at most once.*Received"):
        comm.send([x, x], mesh, "data", pairs=[(0, 1), (0, 0)])
    comm.send([x, None], mesh, "data", pairs=[(0, 1)])
    with pytest.raises(ValueError, match="both eagerly or both in one tf.function"):
        tf.function(lambda: comm.recv(None, mesh, "data", pairs=[(0, 1)]), autograph=False)()
    assert comm.recv(None, mesh, "data", pairs=[(0, 1)])[1].numpy() == [1.0]
