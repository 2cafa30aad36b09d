"""How long an operation of a program runs on one device, estimated from its sizes."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.flops import operation_flops
from kdist.stages.layer_costs import Machine

MACHINE = Machine()


def operation_seconds(operation: Any) -> float:
    """The longer of computing and of moving bytes; 1 operation per element but for products.

    Args:
        operation: A `tf.Operation`, or what has its `type`, `inputs`, `outputs` and `get_attr`.
    """
    made = sum(_elements(t) for t in operation.outputs)
    tensors = [*operation.inputs, *operation.outputs]
    moved = sum(_elements(t) * (t.dtype.size or 0) for t in tensors)
    flops = operation_flops(operation) or made
    return max(flops / MACHINE.flops_per_second, moved / MACHINE.bytes_per_second)


def _elements(tensor: Any) -> int:
    return tensor.shape.num_elements() if tensor.shape.is_fully_defined() else 0
