"""Gathers along the dim that is cut.

DTensor's operation gathers along the first dim: it transposes the part before, and all of the
result afterwards, on every device. Where a gather is a concatenation, it may be along any dim.
"""

from __future__ import annotations

from typing import Any

from kdist.dtensor.rewiring import Rewiring
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf

_GATHER = "CollectiveGatherV2"


def straighten(rewiring: Rewiring) -> None:
    """Lets gathers between transpositions that undo each other be along the dim that is cut."""
    for name in rewiring.program.live:
        if rewiring.nodes[name].op == _GATHER:
            _straighten(rewiring, rewiring.nodes[name])


def _straighten(rewiring: Rewiring, gather: Any) -> None:
    program = rewiring.program
    first = rewiring.nodes.get(node_of(rewiring.now(program.source(gather))))
    last = rewiring.only_user(gather.name)
    before, after = _order(rewiring, first), _order(rewiring, last)
    if first is None or before is None or after is None:
        return
    if not np.array_equal(before[after], np.arange(len(before))):
        return
    source = rewiring.now(first.input[0])
    dim, shape = int(before[0]), program.shape(source)
    if shape.rank is None or shape[dim] is None:
        return
    begins: list[tuple[int, ...]] = [()] * program.program.size
    for members in program.groups(gather):
        for place, k in enumerate(members):
            begins[k] = tuple(shape[dim] * place * (i == dim) for i in range(len(before)))
    rewiring.collective(gather, last, _GATHER, source, "y")
    program.begins[last.name] = begins


def _order(rewiring: Rewiring, node: Any) -> np.ndarray | None:
    """In which order a transposition takes dims; None of anything else."""
    if node is None or node.op != "Transpose":
        return None
    order = rewiring.nodes.get(node_of(node.input[1]))
    if order is None or order.op != "Const":
        return None
    return tf.make_ndarray(order.attr["value"].tensor)
