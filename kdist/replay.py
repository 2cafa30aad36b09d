"""The communication of a step, run on its own: how long its collectives take without compute."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from kdist.optimizer.compressed import bucket_vectors
from kdist.optimizer.jobs import Jobs
from kdist.optimizer.send import send_values
from kdist.parts import whole_of
from kdist.placement import Coordinate, UpdateUnit, relative

import tensorflow as tf

RUNS = 5


class Stand:
    """Gradients of the right sizes, in place of real ones; see `GradientSource`.

    Args:
        jobs: What is updated where.
        value: A scalar of the step's graph, so that nothing is folded away.
    """

    rows: set[int] = set()

    def __init__(self, jobs: Jobs, value: Any) -> None:
        self.jobs = jobs
        self.value = value
        self._made: dict[Any, Any] = {}

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        if (variable, at) not in self._made:
            entry = self.jobs.entries[variable]
            shape = [i.stop - i.start for i in entry.placement.inner_index(at[1])]
            with tf.device(self.jobs.device(at)):
                value = tf.cast(self.value, entry.variable.dtype)
                self._made[variable, at] = tf.fill(shape, value)
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
        for s in range(self.jobs.topology.data_size):
            with tf.device(self.jobs.device((s, k))):
                part = self.local(variable, (s, k))
                parts.append(part if index is None else part[index])
        return tf.add_n(parts)

    def reduced(self, variables: Sequence[int], gradient: Any) -> None:
        """See `GradientSource`."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the communication of a step took on its own.

    Attributes:
        seconds: Median time of the reductions and of sending the values back.
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


def replay(jobs: Jobs, nbytes: int, runs: int = RUNS) -> Measured:
    """Measures the reductions of the update and the sending back of values, without compute.

    Values are sent as they are: nothing changes. Making the stand-in gradients is measured apart
    and taken off; compressing them counts.

    Args:
        jobs: What is updated where.
        nbytes: Bytes that they send, from the plan.
        runs: Repetitions; their median counts.
    """
    compute = _seconds(lambda value: _make(jobs, Stand(jobs, value)), runs)
    together = _seconds(lambda value: _communicate(jobs, Stand(jobs, value)), runs)
    return Measured(max(together - compute, 0.0), nbytes, len(jobs.topology.devices))


def _make(jobs: Jobs, stand: Stand) -> list[Any]:
    made = []
    for v, entry in enumerate(jobs.entries):
        for s, row in enumerate(entry.placement.table):
            for k in range(len(row)):
                with tf.device(jobs.device((s, k))):
                    made.append(tf.reshape(stand.local(v, (s, k)), [-1])[:1])
    return made


def _communicate(jobs: Jobs, stand: Stand) -> list[Any]:
    devices = [one.devices for one in jobs.topology.slices]
    ends = _make(jobs, stand)
    # What low-rank compression keeps is not written: nothing commits.
    source = jobs.compressed(stand, None) or stand
    fused = set()
    for bucket in jobs.buckets:
        fused |= {n for units in bucket.units for n in units}
        for at, vector in zip(bucket.owners, bucket_vectors(bucket, source, devices)):
            with tf.device(jobs.device(at)):
                ends.append(vector[:1])
    for n, unit in enumerate(jobs.units):
        if n not in fused:
            with tf.device(jobs.device(unit.owner)):
                ends.append(tf.reshape(source.unit(unit.variable, unit), [-1])[:1])
    send_values(jobs, range(len(jobs.jobs)))
    return ends


def _seconds(body: Callable[[Any], Any], runs: int) -> float:
    function = tf.function(body, autograph=False)
    value = tf.constant(0.0)
    function(value)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy(), function(value))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
