"""The shapes of a traced graph for other sizes of its inputs, as TensorFlow infers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def imported(
    definition: Any, names: Sequence[str], values: Sequence[Any], wanted: Sequence[Any]
) -> list[Any]:
    """Some tensors of a graph, made in the graph that is being traced."""
    return list(
        tf.graph_util.import_graph_def(
            definition,
            input_map=dict(zip(names, values, strict=True)),
            return_elements=[t.name for t in wanted],
            name="",
        )
    )


class InferredShapes:
    """A graph with all shapes that follow from those of its inputs.

    Args:
        definition: The graph.
        inputs: Its inputs.
        shapes: Their shapes.
    """

    def __init__(self, definition: Any, inputs: Sequence[Any], shapes: Sequence[Any]) -> None:
        names = [t.name for t in inputs]
        self._inputs = dict(zip(names, map(tf.TensorShape, shapes), strict=True))
        self._graph = tf.Graph()
        with self._graph.as_default():
            values = [
                tf.compat.v1.placeholder(t.dtype, shape, "kdist_example")
                for t, shape in zip(inputs, shapes, strict=True)
            ]
            imported(definition, names, values, [])

    def shape(self, tensor: Any) -> tf.TensorShape:
        """Of a tensor of the graph."""
        known = self._inputs.get(tensor.name)
        return self._graph.get_tensor_by_name(tensor.name).shape if known is None else known
