"""A traced function as the program of one device, which is cut and called as a lowered one is."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.lowering import Argument, LoweredProgram
from kdist.graphs.chunks import node_of

import tensorflow as tf


def as_program(concrete: Any) -> LoweredProgram:
    """The program of a concrete function.

    Its flat results are those of the concrete function, in order; its structure is not noted.
    """
    definition = concrete.function_def
    nodes = {node.name: node for node in definition.node_def}
    arguments = [Argument(one.name, i) for i, one in enumerate(definition.signature.input_arg)]

    def result(name: str) -> str:
        reference = definition.ret[name]
        node = nodes.get(node_of(reference))
        # TensorFlow returns copies that wait for everything with an effect.
        copied = node is not None and node.op == "Identity"
        return str(node.input[0]) if node is not None and copied else str(reference)

    def shape(name: str, output: int) -> tf.TensorShape:
        try:
            return concrete.graph.get_operation_by_name(name).outputs[output].shape
        except KeyError:  # renamed, as an argument has its name
            return tf.TensorShape(None)

    return LoweredProgram(
        definition=definition,
        bodies={},
        axes={},
        arguments=tuple(arguments),
        results=tuple(result(one.name) for one in definition.signature.output_arg),
        layouts=(),
        structure=None,
        shape=shape,
    )
