"""Python functions that a program differentiates op by op."""

from __future__ import annotations

from kdist._compat.custom_gradients import taped_python
from kdist.graphs.layer_names import layer_of

import tensorflow as tf


def refuse_python_tapes() -> None:
    """Looks at the graph that is being traced; op by op there is nothing to see.

    Raises:
        ValueError: A `tf.py_function` in it is differentiated. TensorFlow keeps one tape for each
            that is traced, and this trace is called several times in a step: a gradient would be
            that of another replica's rows, or find no tape.
    """
    if tf.executing_eagerly():
        return
    found = taped_python(tf.compat.v1.get_default_graph())
    if found:
        raise ValueError(
            "The gradient of a tf.py_function is that of its last call, and replicas, devices of a "
            "slice and micro-batches each call it in one step. Write it as a tf.custom_gradient "
            "whose two functions call tf.numpy_function, or in TensorFlow's operations. "
            f"Received: {found[0]!r}, in {layer_of(found[0])!r}"
        )
