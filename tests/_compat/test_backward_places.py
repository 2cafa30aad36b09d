"""Every internal behind `kdist._compat.backward_places` is there and does what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist._compat import backward_places

import numpy as np
import pytest
import tensorflow as tf

DEVICE = "/device:CPU:1"
KINDS = ("MatMul", "TanhGrad", "AddN", "PartitionedCall", "StatelessWhile")


@tf.custom_gradient
def steep(x: Any) -> Any:
    return tf.tanh(x), lambda d: tf.matmul(d, tf.eye(2))


def plain(x: Any) -> Any:
    return tf.matmul(tf.tanh(x) + tf.square(x), x)


def in_loop(x: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 2, lambda i, t: (i + 1, tf.matmul(t, x)), (0, x))[1]


def twice(x: Any, call: Callable) -> Any:
    """A gradient of a gradient."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(call(x))
        slope = inner.gradient(y, x)
    return outer.gradient(slope, x)


CALLS: dict[str, Callable] = {
    "operations": plain,
    "a gradient of its own": lambda x: steep(steep(x)) * x,
    "a function": tf.function(plain),
    "a loop": in_loop,
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_computed_where_operations_run(name: str) -> None:
    def computed(placed: Callable) -> tuple[Any, set[str]]:
        devices: set[str] = set()

        def call(x: Any) -> Any:
            with placed(DEVICE):
                return CALLS[name](x)

        def step(x: Any) -> Any:
            made = twice(x, call)
            found = tf.compat.v1.get_default_graph().get_operations()
            devices.update(op.device for op in found if op.type in KINDS)
            return made

        return tf.function(step)(tf.ones((2, 2))), devices

    with backward_places.kept_places():
        value, devices = computed(backward_places.placed)
    assert devices == {DEVICE}
    expected, devices = computed(tf.device)
    np.testing.assert_array_equal(value, expected)
    assert "" in devices, "TensorFlow does so itself"
