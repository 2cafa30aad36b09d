"""What TensorFlow knows of a step before it runs, and puts into functions instead of arguments."""

from __future__ import annotations

from typing import Any

SIZES = frozenset({"Shape", "ShapeN", "Size", "Rank"})


def is_folded(tensor: Any) -> bool:
    """Whether a tensor of a graph follows from constants, and from shapes that are known."""
    seen: set[str] = set()
    waiting = [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in seen or operation.type == "Const":
            continue
        seen.add(operation.name)
        if operation.type in SIZES:
            if not all(t.shape.is_fully_defined() for t in operation.inputs):
                return False
        elif not operation.inputs or operation.op_def.is_stateful:
            return False
        else:
            waiting += [t.op for t in operation.inputs]
    return True
