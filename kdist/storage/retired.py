"""Variables whose value is elsewhere from now on."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def retire(variable: Any) -> None:
    """Empties a `tf.Variable` whose value is elsewhere from now on.

    Functions of an earlier trace that read it would go on with its last value. So they fail, and it
    takes no memory.
    """
    if type(variable).__name__ == "ResourceVariable":  # not what a strategy of TensorFlow made
        with tf.init_scope(), tf.device(variable.device):
            nothing = tf.zeros((0,), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)
