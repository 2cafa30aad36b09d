"""One of several copies of a variable: reads are its own, writes reach all."""

from __future__ import annotations

from kdist._compat.every_copy import WRITES, for_all

import numpy as np
import pytest
import tensorflow as tf


def copies() -> list[tuple[str, tf.Variable]]:
    found = []
    for device in ("/device:CPU:0", "/device:CPU:1"):
        with tf.device(device):
            found.append((device, tf.Variable(tf.ones([3, 2]))))
    return found


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_for_all_writes_to_every_copy(name: str, in_graph: bool) -> None:
    arguments: tuple = (tf.fill([3, 2], 5.0),)
    if name.startswith("scatter_nd"):
        arguments = [[1]], tf.fill([1, 2], 2.0)
    elif name.startswith("scatter"):
        arguments = (tf.IndexedSlices(tf.fill([1, 2], 2.0), [1]),)
    every, wanted = copies(), tf.Variable(tf.ones([3, 2]))
    variable = for_all(every[0][1], every)
    getattr(wanted, name)(*arguments)
    write = tf.function(lambda: getattr(variable, name)(*arguments) is None)
    if in_graph:
        write()
    else:
        assert getattr(variable, name)(*arguments) is variable
    for value in (variable, *(copy for _, copy in every)):
        np.testing.assert_array_equal(value.numpy(), wanted.numpy())
    assert [copy.device[-5:] for _, copy in every] == ["CPU:0", "CPU:1"]


def test_every_method_that_writes_is_known() -> None:
    writes = {n for n in dir(tf.Variable(0.0)) if n.startswith(("assign", "scatter"))}
    assert writes == set(WRITES)


def test_gradients_are_of_the_variable() -> None:
    every = copies()
    variable = for_all(every[0][1], every)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(variable * 3.0)
    np.testing.assert_array_equal(tape.gradient(total, variable), np.full([3, 2], 3.0))
