"""Variables that are no weights, which the forward pass of a program writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdist._compat.function_graphs import function_graph, is_variable

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
    captured = (
        inside for outside, inside in getattr(graph, "captures", ()) if is_variable(outside)
    )
    written = [name for inside in captured for name in _writes(inside)]
    if written:
        raise ValueError(
            "A layer writes a tf.Variable, which every replica would write by itself. Make it a "
            "weight of the layer: self.add_weight(..., trainable=False). "
            f"Received: model={model!r}, which writes one in {written}"
        )


def _writes(variable: Any) -> Iterator[str]:
    """Names of the operations that write a variable, those inside of called functions too."""
    for operation in variable.consumers():
        if operation.type.startswith(_WRITES):
            yield operation.name
        for attribute in operation.node_def.attr.values():
            for called in (attribute.func, *attribute.list.func):
                body = function_graph(operation.graph, called.name) if called.name else None
                if body is None:
                    continue
                # A branch does not get what decides about it, which comes first.
                taken = list(operation.inputs)[-len(body.inputs) :]
                for given, inside in zip(taken, body.inputs, strict=False):
                    if given is variable:
                        yield from _writes(inside)
