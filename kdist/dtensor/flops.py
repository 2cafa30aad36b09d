"""The floating point operations of a traced graph: those of its matrix products, estimated.

A multiply-add counts 2. Everything that is no matrix product or convolution counts nothing, and so
does a product of unknown size. A loop counts as often as it says that it runs at most, once if it
does not say; of branches the dearest counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdist._compat.function_graphs import function_graph

import tensorflow as tf


def graph_flops(graph: Any) -> float:
    """Of the operations of a traced function that its results need; see `operation_flops`."""
    needed: set[Any] = set()
    waiting = [t.op for t in graph.outputs]
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [t.op for t in operation.inputs]
    return sum(map(operation_flops, needed))


def operation_flops(operation: tf.Operation) -> float:
    """Of one operation of a graph, with the functions that it calls."""
    rule = _PRODUCTS.get(operation.type)
    if rule is not None:
        try:
            return 2.0 * rule(operation)
        except (TypeError, ValueError):  # a dim or a rank is not known
            return 0.0
    called = {key: _called(operation, key) for key in ("body", "f", "then_branch", "else_branch")}
    if called["body"] is not None:
        return _times(operation) * graph_flops(called["body"])
    if called["f"] is not None:
        return graph_flops(called["f"])
    branches = [g for key, g in called.items() if key.endswith("branch") and g is not None]
    if "branches" in operation.node_def.attr:
        names = [one.name for one in operation.node_def.attr["branches"].list.func]
        found = [function_graph(operation.graph, name) for name in names]
        branches += [graph for graph in found if graph is not None]
    return max(map(graph_flops, branches), default=0.0)


def _called(operation: tf.Operation, key: str) -> Any:
    attributes = operation.node_def.attr
    if key not in attributes or not attributes[key].func.name:
        return None
    return function_graph(operation.graph, attributes[key].func.name)


def _times(loop: tf.Operation) -> int:
    """How often a loop runs at most: by what its condition says, counters beginning at 0.

    A loop of a backward pass runs as often as its forward loop, whose counter it is given.
    """
    condition = _called(loop, "cond")
    if condition is None:
        return 1
    given = dict(zip([t.name for t in condition.inputs], loop.inputs, strict=True))
    limits = []
    for operation in condition.get_operations():
        if operation.type == "Less":
            limit = operation.inputs[1]
            limits.append(_limit(given.get(limit.name, limit)))
    return min((n for n in limits if n), default=1)


def _limit(tensor: Any) -> int:
    """The value of a number in a graph, or how often the loop ran that made it; 0: not known."""
    while tensor.op.type in ("Identity", "PreventGradient"):
        tensor = tensor.op.inputs[0]
    if tensor.op.type in ("While", "StatelessWhile"):
        return _times(tensor.op)
    if tensor.op.type == "Max":  # what Keras makes of a number of steps
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    return max(int(value), 0) if value is not None and value.ndim == 0 else 0


def _size(dims: Iterable[Any]) -> int:
    return math.prod(int(n) for n in dims)


def _made(operation: tf.Operation) -> int:
    return _size(operation.outputs[0].shape)


def _shared(operation: tf.Operation, transposed: str) -> int:
    """Size of the dim along which two matrices are multiplied."""
    return int(operation.inputs[0].shape[-2 if operation.get_attr(transposed) else -1])


def _einsum(operation: tf.Operation) -> int:
    operands = operation.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict[str, int] = {}
    spread = 1
    for labels, tensor in zip(operands, operation.inputs, strict=True):
        shape = list(tensor.shape)
        before, dots, after = labels.partition("...")
        if dots:
            spread = max(spread, _size(shape[len(before) : len(shape) - len(after)]))
            shape = shape[: len(before)] + shape[len(shape) - len(after) :]
        sizes.update(zip(before + after, map(int, shape), strict=True))
    return spread * _size(sizes.values())


_FILTERS: Mapping[str, Callable[[tf.Operation], tuple[Any, Any]]] = {
    "": lambda op: (op.inputs[1], op.outputs[0]),
    "BackpropInput": lambda op: (op.inputs[1], op.inputs[2]),
    "BackpropInputV2": lambda op: (op.inputs[1], op.inputs[2]),
    "BackpropFilter": lambda op: (op.outputs[0], op.inputs[2]),
    "BackpropFilterV2": lambda op: (op.outputs[0], op.inputs[2]),
}
"""By ending of the type of a convolution: its filter, and what it makes going forward."""


def _convolution(operation: tf.Operation) -> int:
    """Elements made times what goes into each: of a depthwise one, a window of one channel."""
    kind, depthwise, ending = operation.type.partition("dNative")
    ending = ending if depthwise else kind[len("Conv2D") :]
    filters, made = _FILTERS[ending](operation)
    return _size(made.shape) * _size(filters.shape[: 2 if depthwise else -1])


_PRODUCTS: Mapping[str, Callable[[tf.Operation], int]] = {
    "MatMul": lambda op: _made(op) * _shared(op, "transpose_a"),
    "BatchMatMul": lambda op: _made(op) * _shared(op, "adj_x"),
    "BatchMatMulV2": lambda op: _made(op) * _shared(op, "adj_x"),
    "BatchMatMulV3": lambda op: _made(op) * _shared(op, "adj_x"),
    "Einsum": _einsum,
    **{
        kind + ending: _convolution
        for kind in ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
        for ending in _FILTERS
    },
}
