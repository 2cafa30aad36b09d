"""A Python function of another process, called with tensors that lie there.

`tf.numpy_function` is documented for functions of the program's own process. Its operation looks
for the function under a name, in a registry of the process that runs it: so one that another
process has registered runs there, and gets that process's tensors as arrays, without a copy.
Not documented: that name (the attribute `token`), and that any operation with it will do. Held by
tests/_compat/test_remote_python.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_registered: list[tf.Graph] = []
"""TensorFlow forgets a function with the graph that it was registered for."""


def register(function: Callable[..., bytes]) -> str:
    """Lets other processes call a function of this one; starts nothing of TensorFlow.

    Args:
        function: Gets arrays, strings as `bytes`.

    Returns:
        The name for `call`.
    """
    with tf.Graph().as_default() as graph:
        made = tf.numpy_function(function, [0], tf.string)
    _registered.append(graph)
    return str(made.op.get_attr("token").decode())


def call(device: str, name: str, values: Sequence[Any]) -> bytes:
    """Calls a function that the process of a device has registered.

    Args:
        device: A CPU of that process.
        name: What `register` returned there.
        values: Tensors; those on devices of that process are not sent.

    Raises:
        tf.errors.OpError: The function raised, or the process has ended.
    """
    with tf.device(device):
        (found,) = tf.raw_ops.PyFunc(input=list(values), token=name, Tout=[tf.string])
    return bytes(found.numpy())
