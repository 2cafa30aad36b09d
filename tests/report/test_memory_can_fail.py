"""Every edge counts: without one mechanism that frees memory, the checks of memory fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kdist.graphs.live_tensors import Op

from .memory_parts import (
    CUT,
    WHOLE,
    analysed,
    bucket,
    gradients_at_level_2,
    most,
    parameters_at_level_3,
    with_edges,
)


def without_waits(*ops: str) -> Callable[[Op], Op]:
    return lambda op: dataclasses.replace(op, waits=()) if op.kind in ops else op


CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def test_a_backward_pass_that_does_not_wait_is_seen(at_level: Callable) -> None:
    model = at_level(2)
    changed = with_edges(analysed(model), without_waits(*CALLS))
    assert not gradients_at_level_2(changed, model)


def test_new_values_that_travel_all_at_once_are_seen(at_level: Callable) -> None:
    model = at_level(2)
    live = analysed(model)
    moves = {op.kind for op in live.ops.values()} - {*CALLS, "AssignVariableOp"}
    # Where memory is shared, a value is there once, on the owner that puts it together.
    changed = with_edges(live, without_waits(*moves), shared_memory=False)
    assert most(changed, "gathered") > 2 * WHOLE + 4 * bucket(model)


def test_gathers_without_a_gate_are_seen(at_level: Callable) -> None:
    model = at_level(3)
    changed = with_edges(analysed(model), without_waits("ReadVariableOp", "ConcatV2", "Const"))
    assert not parameters_at_level_3(changed, model)


def test_parts_that_are_sent_at_once_are_seen(at_level: Callable) -> None:
    model = at_level(3)
    live = analysed(model)
    changed = with_edges(live, without_waits("ReadVariableOp"), shared_memory=False)
    assert most(changed, "gathered") > 0.8 * CUT
