"""In which order a step's instructions are written down, and how that order is enforced.

TensorFlow runs what is ready. So that each stage computes in the order of its schedule, its calls
are chained by control edges. Data flows between stages along the edges of the graph, and state that
a forward pass writes (statistics, seeds) from one micro-batch to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdist._compat import keras_trainer
from kdist.pipeline.dependencies import Dependencies
from kdist.pipeline.instructions import Forward, Instruction
from kdist.pipeline.schedule import Schedule

import tensorflow as tf


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in its order: what evaluation and prediction run."""
    rows = tuple(tuple(one for one in row if isinstance(one, Forward)) for row in schedule.stages)
    return Schedule(name=schedule.name, stages=rows)


def forwards_first(schedule: Schedule) -> Schedule:
    """A schedule with the forwards of each stage before its backwards, both in its order."""
    rows = [sorted(row, key=lambda one: not isinstance(one, Forward)) for row in schedule.stages]
    return Schedule(name=schedule.name, stages=tuple(map(tuple, rows)))


def execution_order(
    schedule: Schedule, written: Mapping[str, Sequence[int]] | None = None
) -> tuple[Instruction, ...]:
    """All instructions, one by one, each after what it uses.

    Args:
        schedule: The schedule, or the forwards of one.
        written: Name of each state that forward passes write, with the virtual stages that use it,
            ascending. A micro-batch finds it as the one before left it.

    Returns:
        The order.

    Raises:
        ValueError: A stage takes micro-batches in another order than state flows.
    """
    before = _state_edges(schedule, written or {})
    dependencies = Dependencies(schedule)
    position = [0] * schedule.num_stages
    done: set[Instruction] = set()
    order: list[Instruction] = []
    total = sum(map(len, schedule.stages))
    while len(order) < total:
        ready = []
        for row, index in zip(schedule.stages, position):
            if index == len(row):
                continue
            wanted = {*dependencies.inputs(row[index]), *before.get(row[index], ())}
            if wanted <= done:
                ready.append(row[index])
        if not ready:
            raise _out_of_order(schedule, position, written or {})
        for one in ready:
            position[one.stage] += 1
            done.add(one)
            order.append(one)
    return tuple(order)


def _state_edges(
    schedule: Schedule, written: Mapping[str, Sequence[int]]
) -> dict[Instruction, set[Instruction]]:
    forwards = {
        (one.micro_batch, one.virtual_stage(schedule.num_stages)): one
        for one in schedule
        if isinstance(one, Forward)
    }
    edges: dict[Instruction, set[Instruction]] = {}
    for users in written.values():
        chain = [forwards[i, v] for i in range(schedule.micro_batches) for v in users]
        for earlier, later in zip(chain, chain[1:]):
            edges.setdefault(later, set()).add(earlier)
    return edges


def _out_of_order(
    schedule: Schedule, position: Sequence[int], written: Mapping[str, Sequence[int]]
) -> ValueError:
    stuck = [str(row[i]) for row, i in zip(schedule.stages, position) if i < len(row)]
    return ValueError(
        "State that forward passes write (statistics, seeds) goes from micro-batch to micro-batch "
        "in ascending order, and from stage to stage. Put the forwards of each stage in that "
        f"order, or use schedule='1f1b'. Received: schedule {schedule.name!r}, which waits for "
        f"ever in: {'; '.join(stuck)}; state {sorted(written)}"
    )


class Chain:
    """Enforces the order of one stage of one replica: each call waits for the one before."""

    def __init__(self) -> None:
        self.last: tf.Operation | None = None
        self._awaited: list[tuple[int, ...]] = []
        self._waiting: list[tuple[tf.Operation, tuple[int, ...]]] = []

    def add(self, first: tf.Operation | None, last: tf.Operation | None) -> None:
        """The next call: its first and its last operation; None where no graph computes it."""
        if first is not None and self.last is not None:
            keras_trainer.run_after(first, [self.last])
        if first is not None:
            self._waiting += [(first, weights) for weights in self._awaited]
            self._awaited.clear()
        self.last = self.last if last is None else last

    def wait(self, weights: tuple[int, ...]) -> None:
        """The next call waits until the gradients of some weights are summed."""
        self._awaited.append(weights)

    def close(self, sums: Mapping[tuple[int, ...], Sequence[tf.Operation]]) -> None:
        """Makes calls wait for the operations that sum gradients; all calls are there."""
        for first, weights in self._waiting:
            keras_trainer.run_after(first, sums[weights])
