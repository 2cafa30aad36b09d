"""One pass over the stages of a pipeline: its work, interpreted instruction by instruction.

What an instruction does is in one table. Computations and messages are written per replica, the
former chained in the order of their stage; what stages do with weights concerns all replicas of a
stage at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.graphs.instantiation import instantiated_cheaply
from kdist.optimizer.gather import Gatherer
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.pipeline.communication import Receive, Send
from kdist.pipeline.instructions import (
    Await,
    Forward,
    Free,
    Gather,
    Instruction,
    Penalty,
    Reduce,
    Update,
)
from kdist.pipeline.work import Step, Work
from kdist.runtime.flow import Flow
from kdist.runtime.micro_batches import MicroBatches
from kdist.runtime.order import Chain
from kdist.runtime.recorder import TimelineRecorder
from kdist.runtime.runner_contract import Begin

import tensorflow as tf


class PipelineRun:
    """Interprets the work of a pass.

    Args:
        work: What each stage does.
        order: Its computations, one by one.
        micro: The batch.
        flows: Per replica, its values.
        gatherer: Gathers weights on the slices that store them.
        recorder: Notes when computations ran, if that is wanted.
    """

    def __init__(
        self,
        work: Work,
        order: Sequence[Instruction],
        micro: MicroBatches,
        flows: Sequence[Flow],
        gatherer: Gatherer,
        recorder: TimelineRecorder | None,
    ) -> None:
        self.order, self.micro, self.flows = order, micro, list(flows)
        self.runner, self.backend = flows[0].runner, flows[0].backend
        self.gatherer, self.recorder = gatherer, recorder
        self.table: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            Receive: self._receive,
            Gather: self._gather,
            Free: self._free,
            Penalty: self._penalty,
            Reduce: self._reduce,
            Await: self._await,
            Update: self._update,
        }
        self._rows = [list(row) for row in work.stages]
        self._chains: dict[tuple[int, int], Chain] = {}
        self._at_the_end: list[Reduce | Update] = []
        self._ended: dict[int, list[tf.Operation]] = {}

    def forwards(self) -> None:
        """Writes up to the last forward of each stage."""
        self._write([one for one in self.order if isinstance(one, Forward)])

    def rest(self) -> None:
        """Writes what is left."""
        self._write([one for one in self.order if not isinstance(one, Forward)])
        self._end()

    def all(self) -> None:
        """Writes all of it into the graph of the step."""
        self._write(self.order)
        self._end()

    def _write(self, computations: Sequence[Instruction]) -> None:
        for wanted in computations:
            for one in self._until(wanted):
                self.table.get(type(one), self._compute)(one)

    def _until(self, wanted: Instruction) -> list[Step]:
        """What a stage does from where it is until a computation is done and sent."""
        row = self._rows[wanted.stage]
        end = row.index(wanted) + 1
        for at, one in enumerate(row[end:], end):
            if isinstance(one, Instruction):
                break
            if isinstance(one, Send):
                end = at + 1
        self._rows[wanted.stage] = row[end:]
        return row[:end]

    def _end(self) -> None:
        for row in self._rows:
            for one in row:
                self.table[type(one)](one)
        if self.recorder is not None:
            self.recorder.end(lambda r, stage: self.flows[r].device(stage))

    def _chain(self, replica: int, stage: int) -> Chain:
        return self._chains.setdefault((replica, stage), Chain())

    def _compute(self, one: Instruction) -> None:
        for r, flow in enumerate(self.flows):
            with instantiated_cheaply(self.runner.devices):
                first, last = flow.run(one, self.recorder)
            self._ended[flow.slice(one.stage)] = [] if last is None else [last]
            self._chain(r, one.stage).add(first, last)

    def _send(self, one: Send) -> None:
        for flow in self.flows:
            flow.send(one.message)

    def _receive(self, one: Receive) -> None:
        for flow in self.flows:
            flow.receive(one.message)

    def _gather(self, one: Gather) -> None:
        """Gathers when the computation before has ended, on each slice for itself."""
        mine = [flow.slice(one.stage) for flow in self.flows]
        every = [op for s in mine for op in self._ended.get(s, [])]
        computes = {s: n for n, places in enumerate(self.backend.in_storage) for s, _ in places}
        gates = [
            self._ended.get(computes[s], []) if computes[s] in mine else every
            for s in sorted(computes)
        ]
        places = {n: self.backend.places[n] for n in mine}
        slices = sorted({s for one in places.values() for s, _ in one})
        with tf.name_scope(f"{one.chunk * self.runner.schedule.num_stages + one.stage}G"):
            found = self.gatherer(one.weights, gates, slices)
        for flow, n in zip(self.flows, mine):
            flow.held.setdefault(n, {}).update(
                (v, self.backend.gathered(v, [found[s][v][k] for s, k in places[n]]))
                for v in one.weights
            )

    def _free(self, one: Free) -> None:
        for flow in self.flows:
            held = flow.held[flow.slice(one.stage)]
            for weight in one.weights:
                del held[weight]

    def _penalty(self, one: Penalty) -> None:
        self.flows[0].penalty(one.stage, one.weights)

    def _reduce(self, one: Reduce) -> None:
        """Notes it: sums may have effects, and are written once nothing is to be traced anew."""
        self._at_the_end.append(one)

    def _update(self, one: Update) -> None:
        """Notes it too: sums that come later wait for it."""
        self._at_the_end.append(one)

    def _await(self, one: Await) -> None:
        for r in range(len(self.flows)):
            self._chain(r, one.stage).wait(one.weights)

    def reduce(self, begin: Begin, source: SliceGradients, connected: Sequence[int]) -> None:
        """Sums the gradients of a pass that has been written, in the order of its work."""
        reduction = begin(source, connected)
        complete: set[int] = set()
        used: dict[int, set[int]] = {}
        sums: dict[tuple[int, ...], Sequence[tf.Operation]] = {}
        for one in self._at_the_end:
            if isinstance(one, Update):
                used.setdefault(one.stage, set()).update(one.weights)
                continue
            complete |= set(one.weights)
            sums[one.weights] = reduction.advance(complete, used.pop(one.stage, ()))
        for chain in self._chains.values():
            chain.close(sums)
