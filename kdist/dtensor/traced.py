"""A traced function as the program of one device, which is cut and called as a lowered one is."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.lowered_program import Argument, LoweredProgram
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

    operations = _operations(concrete)

    def shape(name: str, output: int) -> tf.TensorShape:
        operation = operations.get(name)
        return tf.TensorShape(None) if operation is None else operation.outputs[output].shape

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


def _operations(concrete: Any) -> dict[str, tf.Operation]:
    """The operations of a function's graph by the names of their nodes in its definition.

    A node is renamed if an argument or a result has its name; nodes stand in the graph's order.
    """
    given = {t.op.name for t in concrete.inputs}
    made = (op for op in concrete.graph.get_operations() if op.name not in given)
    pairs = zip(concrete.function_def.node_def, made)
    return {node.name: op for node, op in pairs if node.op == op.type}
