"""Values that a graph computes from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def constant_value(tensor: Any) -> np.ndarray | None:
    """What a tensor of a graph always is.

    TensorFlow tells that of some operations; what leads to the tensor is run for others.

    Args:
        tensor: The tensor.

    Returns:
        Its value; None if it follows from arguments, variables, chance or functions.
    """
    if (known := tf.get_static_value(tensor)) is not None:
        return np.asarray(known)
    nodes: dict[str, Any] = {}
    waiting = [tensor.op]
    while waiting:
        op = waiting.pop()
        if op.name in nodes:
            continue
        if op.type == "Placeholder" or op.op_def.is_stateful or _calls(op.node_def):
            return None
        nodes[op.name] = copy = tf.compat.v1.NodeDef()
        copy.CopyFrom(op.node_def)
        copy.input[:] = [one for one in copy.input if not one.startswith("^")]
        copy.device = ""
        waiting.extend(one.op for one in op.inputs)
    definition = tf.compat.v1.GraphDef(node=nodes.values())
    definition.versions.CopyFrom(tensor.graph.as_graph_def().versions)

    def run() -> Any:
        return tf.graph_util.import_graph_def(definition, return_elements=[tensor.name])[0]

    with tf.init_scope():
        return np.asarray(tf.compat.v1.wrap_function(run, [])())


def _calls(node: Any) -> bool:
    """Whether a node calls functions, which its graph alone has."""
    return any(value.HasField("func") or value.list.func for value in node.attr.values())
