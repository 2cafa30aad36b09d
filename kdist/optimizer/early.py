"""Updates that need not wait for the whole backward pass, and gradients that wait for them.

At levels 2 and 3 gradients are summed chunk by chunk. Nothing but the order of a run says when the
optimizer uses a sum: at worst all sums, and all new values, are there at the end. So on each device
sums wait until those have been used and written whose `Update` comes before them in the work of the
step (`kdist.pipeline.work`). What needs all sums first is updated at its end, see `needs_all`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_optimizers, keras_trainer
from kdist.graphs.write_order import READS, order_to_come
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.wrappers import optimizer_groups, unwrap
from kdist.sharding.device import Device
from kdist.storage.variables import Stored

import keras
import tensorflow as tf


def needs_all(optimizer: Any, variables: Sequence[keras.Variable]) -> bool:
    """Whether no update can be made before all gradients of a step are summed.

    A loss scale may skip the step, clipping may be by the norm of all, gradients may accumulate.

    Args:
        optimizer: As it was compiled.
        variables: What it trains.
    """
    if unwrap(optimizer).loss_scale is not None:
        return True
    leaves = [leaf for leaf, _ in optimizer_groups(optimizer, variables)]
    return any(one.global_clipnorm or one.gradient_accumulation_steps for one in leaves)


def update_early(reduction: Reduction) -> int:
    """Makes sums of gradients wait for the updates before them, in the graph of the step.

    Call it when the whole step is written down, the order of its writes included.

    Args:
        reduction: Of the step.

    Returns:
        How many edges were added.
    """
    graph = tf.compat.v1.get_default_graph()
    if not any(one.used for one in reduction.rounds):
        return 0
    entries, writes = reduction.jobs.entries, _writes(graph)
    rounds = [[op for op in one.sums if op.graph is graph] for one in reduction.rounds]
    latest = _latest(graph, {op: r for r, sums in enumerate(rounds) for op in sums})
    devices = {Device.parse(op.device).name for sums in rounds for op in sums}
    waiting: dict[str, set[int]] = {device: set() for device in devices}
    found = 0
    for r, one in enumerate(reduction.rounds):
        at: dict[str, list[tf.Operation]] = {}
        for op in rounds[r]:
            at.setdefault(Device.parse(op.device).name, []).append(op)
        for used in waiting.values():
            used |= one.used
        for device, sums in at.items():
            ends = [_on(device, entries[v], writes) for v in sorted(waiting[device])]
            waiting[device].clear()
            # What follows from these sums, or from later ones, cannot come before them. Of a
            # parameter all writes or none: where one came before these sums and another seemed to
            # follow from them, TensorFlow might take that for the order of the two.
            early = [op for mine in ends if all(latest[op] < r for op in mine) for op in mine]
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
