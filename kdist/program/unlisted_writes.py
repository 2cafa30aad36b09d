"""Variables that are no weights, which the forward pass of a program writes."""

from __future__ import annotations

from kdist._compat.function_graphs import is_variable

import tensorflow as tf

_WRITES = ("Assign", "ResourceScatter")


def refuse_unlisted_writes(model: str) -> None:
    """Looks at the graph that is being traced; op by op there is nothing to see.

    Args:
        model: Its name.

    Raises:
        ValueError: A layer writes a `tf.Variable` of its own: each replica would, and a pass that
            runs again too.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    written = [
        operation.name
        for outside, inside in getattr(graph, "captures", ())
        if is_variable(outside)
        for operation in inside.consumers()
        if operation.type.startswith(_WRITES)
    ]
    if written:
        raise ValueError(
            "A layer writes a tf.Variable, which every replica would write by itself. Make it a "
            "weight of the layer: self.add_weight(..., trainable=False). "
            f"Received: model={model!r}, which writes one in {written}"
        )
