"""The communication of a step, run on its own: how long its collectives take without compute."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist.optimizer.broadcast import send_values
from kdist.optimizer.gather import Gatherer
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.update_jobs import Jobs
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, relative
from kdist.storage.parts import whole_of
from kdist.storage.variables import Stored

import tensorflow as tf

RUNS = 5


class Stand:
    """Gradients of the right sizes, in place of real ones; see `GradientSource`.

    They lie on their devices before the clock starts.

    Args:
        jobs: What is updated where.
    """

    rows: set[int] = set()

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self._made: dict[Any, Any] = {}

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        entry = self.jobs.entries[variable]
        if at[0] not in entry.placement.slices:
            return None
        if (variable, at) not in self._made:
            shape = [i.stop - i.start for i in entry.placement.inner_index(at[1])]
            with tf.init_scope(), tf.device(self.jobs.device(at)):
                self._made[variable, at] = tf.zeros(shape, entry.variable.dtype)
        return self._made[variable, at]

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        placement = self.jobs.entries[variable].placement
        if unit.shard is None:
            return whole_of(placement, lambda k: self._total(variable, k, None))
        inner = unit.owner[1]
        index = relative(unit.index(placement), placement.inner_index(inner))
        return self._total(variable, inner, index)

    def _total(self, variable: int, k: int, index: Any) -> Any:
        parts = []
        for s in self.jobs.entries[variable].placement.slices:
            with tf.device(self.jobs.device((s, k))):
                part = self.local(variable, (s, k))
                parts.append(part if index is None else part[index])
        return tf.add_n(parts)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the communication of a step took on its own.

    Attributes:
        seconds: Median time; 0 where nothing is sent.
        nbytes: Bytes that travel between devices.
        devices: Devices that take part.
    """

    seconds: float
    nbytes: int
    devices: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second and device: of an all-reduce the bus bandwidth of nccl-tests."""
        return self.nbytes / self.devices / self.seconds if self.seconds else 0.0


def replay(
    jobs: Jobs,
    gathers: Sequence[tuple[Sequence[Stored], Sequence[int]]],
    tables: Collection[int],
    by_rows: Collection[int],
    nbytes: int,
    runs: int = RUNS,
) -> Measured:
    """Measures a step's gathers, reductions and the sending back of values, without compute.

    One function does all of it, on gradients that are there before; calling it counts, as does
    compressing, and so the time is never 0 where something is sent. Values are sent as they are:
    nothing changes. Rows of embedding tables, whose number depends on the batch, are left out.

    Args:
        jobs: What is updated where.
        gathers: The weights of each gather before use, and the slices that get them.
        tables: Trainable variables whose gradients are rows.
        by_rows: Of these, those of which changed rows are sent.
        nbytes: Bytes that all of it sends, from the plan.
        runs: Repetitions; their median counts.
    """
    devices = len(jobs.topology.devices)
    if not nbytes:
        return Measured(0.0, 0, devices)
    stand = Stand(jobs)
    function = tf.function(
        lambda: _communicate(jobs, gathers, tables, by_rows, stand), autograph=False
    )
    return Measured(_seconds(function, runs), nbytes, devices)


def _communicate(
    jobs: Jobs,
    gathers: Sequence[tuple[Sequence[Stored], Sequence[int]]],
    tables: Collection[int],
    by_rows: Collection[int],
    stand: Stand,
) -> list[Any]:
    ends = _gather(gathers, jobs.topology)
    dense = {v for v in range(len(jobs.entries)) if v not in tables}
    # What low-rank compression keeps is not written: nothing keeps it.
    sums = Reduction(jobs, stand, dense, dense, None)
    sums.advance(dense)
    for n, gradient in sums.gradients.items():
        with tf.device(jobs.device(jobs.jobs[n].owner)):
            ends.append(_first(gradient))
    send_values(jobs, [n for n, job in enumerate(jobs.jobs) if jobs.variable(job) not in by_rows])
    return ends


def _gather(
    gathers: Sequence[tuple[Sequence[Stored], Sequence[int]]], topology: Topology
) -> list[Any]:
    """What is stored cut, made whole wherever it is used, one gather after another."""
    devices = [one.devices for one in topology.slices]
    gates: list[list[Any]] = [[] for _ in devices]
    for group, slices in gathers:
        together = ["one bucket"] * len(group)
        gather = Gatherer(group, topology, devices, together)
        for s, parts in enumerate(gather(range(len(group)), gates, slices)):
            ends = []
            for values in parts.values():
                for device, value in zip(devices[s], values, strict=True):
                    with tf.device(device):
                        ends.append(_first(value))
            gates[s] = [end.op for end in ends] or gates[s]
    return [op.outputs[0] for one in gates for op in one]


def _first(tensor: Any) -> Any:
    """An element that is there when the tensor is."""
    return tf.reshape(tensor, [-1])[:1]


def _seconds(function: Callable[[], Any], runs: int) -> float:
    """Median time of a call, the first one left out."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy(), function())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
