"""What TensorFlow does with Python functions, as far as `remote_python` needs it."""

from __future__ import annotations

import gc

from kdist._compat import remote_python

import numpy as np
import pytest
import tensorflow as tf


def test_register() -> None:
    """The function stays, though nobody here keeps it."""
    name = remote_python.register(lambda *values: b"%d" % len(values))
    gc.collect()
    assert remote_python.call("/device:CPU:0", name, []) == b"0"


def test_call() -> None:
    """Strings are bytes, and tensors are arrays over their own memory."""
    seen = []

    def function(text: bytes, values: np.ndarray) -> bytes:
        seen.append(values)
        return text + b"!"

    name = remote_python.register(function)
    tensor = tf.random.normal((1000,))
    assert remote_python.call("/device:CPU:0", name, [tf.constant("yes"), tensor]) == b"yes!"
    np.testing.assert_array_equal(seen[0], tensor)
    assert seen[0].ctypes.data == np.asarray(memoryview(tensor)).ctypes.data


def test_what_was_held_stays_as_it_was() -> None:
    """TensorFlow writes elsewhere while somebody holds a variable's memory."""
    held = []
    name = remote_python.register(lambda values: held.append(values) or b"")
    variable = tf.Variable(tf.ones((1000,)))
    remote_python.call("/device:CPU:0", name, [variable])
    variable.assign_add(tf.ones((1000,)))
    assert held[0].sum() == 1000 and float(tf.reduce_sum(variable)) == 2000


def test_what_a_function_raises_is_told() -> None:
    def fails() -> bytes:
        raise OSError("no room")

    name = remote_python.register(fails)
    with pytest.raises(tf.errors.OpError, match="no room"):
        remote_python.call("/device:CPU:0", name, [])
