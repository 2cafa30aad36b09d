"""Updates that need not wait for the whole backward pass, and gradients that wait for them.

At levels 2 and 3 gradients are summed chunk by chunk. Nothing but the order of a run says when the
optimizer uses a sum: at worst all sums, and all new values, are there at the end. So on each device
the sums of a chunk wait until those of the chunk before the last have been used and written. What
cannot be used early, because it needs all sums first (clipping by the global norm, a loss scale
that may skip the step, accumulation), is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist._compat import keras_optimizers, keras_trainer
from kdist.graphs.write_order import READS, order_to_come
from kdist.optimizer.reduction import Reduction
from kdist.sharding.device import Device
from kdist.storage.variables import Stored

import tensorflow as tf

IN_FLIGHT = 1
"""Chunks whose sums may be there, not used yet, while another chunk's are made."""


def update_early(reduction: Reduction) -> int:
    """Makes sums of gradients wait for the updates before them, in the graph of now.

    Call it when the whole step is written down, the order of its writes included.

    Args:
        reduction: Of the step.

    Returns:
        How many edges were added.
    """
    graph = tf.compat.v1.get_default_graph()
    rounds = [(v, sums) for v, sums in reduction.rounds if sums and sums[0].graph is graph]
    if len(rounds) <= 1 + IN_FLIGHT:
        return 0
    entries, writes = reduction.jobs.entries, _writes(graph)
    latest = _latest(graph, {op: r for r, (_, sums) in enumerate(rounds) for op in sums})
    by_device: dict[str, list[tuple[int, list[tf.Operation], list[list[tf.Operation]]]]] = {}
    for r, (variables, sums) in enumerate(rounds):
        at: dict[str, list[tf.Operation]] = {}
        for op in sums:
            at.setdefault(Device.parse(op.device).name, []).append(op)
        for device, ops in at.items():
            ends = [_on(device, entries[v], writes) for v in sorted(variables)]
            by_device.setdefault(device, []).append((r, ops, ends))
    found = 0
    for mine in by_device.values():
        for (_, _, ends), (r, sums, _) in zip(mine, mine[1 + IN_FLIGHT :]):
            # What follows from these sums, or from later ones, cannot come before them. Of a
            # parameter all writes or none: where one came before these sums and another seemed to
            # follow from them, TensorFlow might take that for the order of the two.
            early = [op for one in ends if all(latest[op] < r for op in one) for op in one]
            for op in sums:
                keras_trainer.run_after(op, early)
            found += len(early) * len(sums)
    return found


def _on(device: str, entry: Stored, writes: Mapping[int, list[tf.Operation]]) -> list[tf.Operation]:
    """What writes the parts of a parameter that a device has."""
    return [
        op
        for at, local in entry.locals.items()
        if Device.parse(entry.device(at)).name == device
        for op in writes.get(id(keras_optimizers.handle(local)), ())
    ]


def _writes(graph: Any) -> dict[int, list[tf.Operation]]:
    """By a variable's handle, the operations that may write it."""
    outer = {inner.ref(): id(handle) for handle, inner in graph.captures}
    found: dict[int, list[tf.Operation]] = {}
    for op in graph.get_operations():
        if op.type not in (*READS, "VarIsInitializedOp"):
            for one in op.inputs:
                if one.dtype == tf.resource and one.ref() in outer:
                    found.setdefault(outer[one.ref()], []).append(op)
    return found


def _latest(graph: Any, rounds: Mapping[tf.Operation, int]) -> dict[tf.Operation, int]:
    """Per operation, the last round of sums that it follows from; -1 if none."""
    found: dict[tf.Operation, int] = {}
    ordered = order_to_come(graph)
    for start in graph.get_operations():
        stack = [start]
        while stack:
            op = stack[-1]
            if op in found:
                stack.pop()
                continue
            before = [one.op for one in op.inputs] + op.control_inputs + ordered.get(op, [])
            if missing := [one for one in before if one not in found]:
                stack += missing
                continue
            found[op] = max([rounds.get(op, -1), *(found[one] for one in before)])
            stack.pop()
    return found
