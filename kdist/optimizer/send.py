"""New values go from their owners to the other holders.

From level 2 on, devices have no room for all new values at once: they travel one bucket after the
other, `IN_FLIGHT` of them at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from kdist import _private
from kdist.optimizer.bucket import Bucket
from kdist.optimizer.jobs import Jobs
from kdist.placement import Coordinate, UpdateUnit
from kdist.variables import Rows

import keras
import tensorflow as tf

IN_FLIGHT = 1
"""Buckets that may be on their way while another one arrives."""
EVERYWHERE = ""
"""Stands for all devices."""


class AnyOrder:
    """All travel as soon as they can."""

    def gate(self, where: str) -> contextlib.AbstractContextManager:
        """Around what the next one does on a device, or `EVERYWHERE`."""
        return contextlib.nullcontext()

    def leaving(self, value: Any) -> Any:
        """What is sent of a value; call it behind a gate."""
        return tf.convert_to_tensor(value)

    def arrived(self, where: str, writes: Sequence[Any]) -> None:
        """Notes the operations that write one to the copies on a device, or on all."""


class OneByOne(AnyOrder):
    """One leaves, and arrives at, a device when the last but `IN_FLIGHT` has arrived there.

    So a device that is slow is not sent everything by those that are fast.
    """

    def __init__(self) -> None:
        self._arrived: dict[str, list[list[tf.Operation]]] = {}

    def gate(self, where: str) -> contextlib.AbstractContextManager:
        """See `AnyOrder`."""
        arrived = self._arrived.get(where, [])
        last = len(arrived) - 1 - IN_FLIGHT
        return tf.control_dependencies(arrived[last]) if last >= 0 else contextlib.nullcontext()

    def leaving(self, value: Any) -> Any:
        """See `AnyOrder`. The value itself may have been read before."""
        return tf.identity(value)

    def arrived(self, where: str, writes: Sequence[Any]) -> None:
        """See `AnyOrder`."""
        self._arrived.setdefault(where, []).append([op for op in writes if op is not None])


def send_values(jobs: Jobs, numbers: Any, one_by_one: bool = False) -> None:
    """Sends each updated part to its other holders; those first that are ready first.

    Args:
        jobs: The jobs.
        numbers: Of those that have updated something.
        one_by_one: Whether values travel bucket by bucket, to save memory.
    """
    order = OneByOne() if one_by_one else AnyOrder()
    updated = {n for number in numbers for n in jobs.jobs[number].units}
    for bucket in reversed(jobs.buckets):
        units = {n for each in bucket.units for n in each}
        if units <= updated:
            _send_bucket(jobs, bucket, order)
            updated -= units
    for n in sorted(updated, reverse=True):
        _send_unit(jobs, jobs.units[n], jobs.jobs[jobs.of[n]].variable, order)


def _send_unit(jobs: Jobs, unit: UpdateUnit, source: keras.Variable, order: AnyOrder) -> None:
    entry = jobs.entries[unit.variable]
    writes: list[Any] = []
    with tf.device(jobs.device(unit.owner)), order.gate(EVERYWHERE):
        value = order.leaving(source.value)
    for at, local in entry.locals.items():
        shard = entry.placement.table[at[0]][at[1]]
        if local is source or (unit.shard is not None and unit.shard != shard):
            continue
        if unit.replicated and at[0] != unit.owner[0]:
            continue
        if unit.shard is None:
            with tf.device(jobs.device(unit.owner)):
                part = value[entry.placement.shards[shard].index]
            with tf.device(entry.device(at)):
                writes.append(_private.write(local, part))
        elif unit.rows is None:
            with tf.device(entry.device(at)):
                writes.append(_private.write(local, value))
        elif at != unit.owner:
            (rows,) = jobs.own_rows(unit)
            with tf.device(entry.device(at)):
                Rows(local, rows.start, rows.stop).assign(value)
    if writes:
        order.arrived(EVERYWHERE, writes)


def _send_bucket(jobs: Jobs, bucket: Bucket, order: AnyOrder) -> None:
    """Sends a bucket's new values from their owners to the other holders.

    Members that are stored cut have nothing to gather: only other holders of a shard get it.
    """
    vectors = []
    for at, units in zip(bucket.owners, bucket.units):
        with tf.device(jobs.device(at)), order.gate(_where(jobs, bucket, at)):
            vectors.append(order.leaving(vector_of(jobs, bucket, units)))
    rows = jobs.units[bucket.units[0][0]].rows is not None
    holders = sorted({at for each in bucket.holders for at in each})
    writes: dict[str, list[Any]] = {}
    for at in holders:
        if at in bucket.owners and not rows:
            continue
        locals_ = [jobs.entries[v].locals[at] for v in bucket.members]
        where = _where(jobs, bucket, at)
        with tf.device(jobs.device(at)), order.gate(where):
            if rows:
                values = bucket.split(tf.stack(vectors))
            else:
                (p,) = (p for p, each in enumerate(bucket.holders) if at in each)
                values = bucket.pieces(vectors[p])
            writes.setdefault(where, []).extend(map(_private.write, locals_, values))
    for where, operations in writes.items():
        order.arrived(where, operations)


def _where(jobs: Jobs, bucket: Bucket, at: Coordinate) -> str:
    """What a coordinate waits for: an owner that gets nothing does not know how far others are."""
    return jobs.device(at) if len(bucket.owners) > 1 else EVERYWHERE


def vector_of(jobs: Jobs, bucket: Bucket, units: Sequence[int]) -> Any:
    """An owner's values of a bucket."""
    variables = [jobs.jobs[jobs.of[n]].variable for n in units]
    if bucket.flat:
        return tf.convert_to_tensor(variables[0].value)
    return tf.concat([tf.reshape(v.value, [-1]) for v in variables], 0)
