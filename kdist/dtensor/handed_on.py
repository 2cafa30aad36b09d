"""What loops and calls hand on as they got it, taken from where it came from.

A loop returns everything that its body reads, weights too, and TensorFlow's backward loop takes the
weights from the forward one's results. So a chunk of the backward pass would not be known to use
them, and what is gathered for the forward pass would be kept for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdist._compat import dtensor_internals

from tensorflow.core.framework import node_def_pb2

_BODIES = {
    "While": "body",
    "StatelessWhile": "body",
    "PartitionedCall": "f",
    "StatefulPartitionedCall": "f",
}
"""By operation, the attribute that names its function, which takes what the operation takes."""


def handed_on(nodes: Mapping[str, Any], bodies: Mapping[str, Any]) -> dict[str, str]:
    """References of what loops and calls give that they took, and of what that was.

    Args:
        nodes: Of the program, by name.
        bodies: Functions that they call, by name, where TensorFlow does not keep them.
    """
    found = {
        f"{name}:output:{i}": node.input[taken]
        for name, node in nodes.items()
        if node.op in _BODIES
        for i, taken in _unchanged(node, bodies)
    }
    # One loop may take it from another.
    for given in found:
        while found[given] in found:
            found[given] = found[found[given]]
    return found


def redirected(nodes: Mapping[str, Any], instead: Mapping[str, str]) -> dict[str, Any]:
    """The nodes, those that take other tensors now as copies.

    Args:
        nodes: By name.
        instead: By reference, the other one's.
    """
    found = dict(nodes)
    for name, node in nodes.items():
        if any(one in instead for one in node.input):
            found[name] = copy = node_def_pb2.NodeDef()
            copy.CopyFrom(node)
            copy.input[:] = [instead.get(one, one) for one in node.input]
    return found


def _unchanged(node: Any, bodies: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Positions of results that are inputs, and of these."""
    called = node.attr[_BODIES[node.op]].func.name
    body = bodies[called] if called in bodies else dtensor_internals.function_def(called)
    arguments = {one.name: i for i, one in enumerate(body.signature.input_arg)}
    inside = {one.name: one for one in body.node_def}
    loop = node.op.endswith("While")
    for i, one in enumerate(body.signature.output_arg):
        reference = body.ret[one.name]
        while (made := inside.get(reference.partition(":")[0])) is not None:
            if made.op != "Identity" or len(made.input) != 1:
                break
            reference = made.input[0]
        taken = arguments.get(reference)
        # What a loop swaps with something else is another value in each turn.
        if taken is not None and (taken == i or not loop):
            yield i, taken
