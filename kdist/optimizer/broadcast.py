"""New values go from their owners to the other holders; of tables, rows that changed, if it can be.

From level 2 on, devices have no room for all new values at once: they travel one bucket after the
other, `IN_FLIGHT` of them at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.optimizer.routed import Routed
from kdist.optimizer.update_jobs import Jobs
from kdist.plan.bucket import Bucket, shards_at
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, Index
from kdist.storage.flat_rows import flat, unflat
from kdist.storage.transfer import Sent

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

    def all_of(self, writes: Sequence[Any]) -> Any:
        """Stands for several writes, on the device in scope; None if nothing will wait for them."""
        return None


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

    def all_of(self, writes: Sequence[Any]) -> Any:
        """See `AnyOrder`: one edge to each that waits, rather than one from every write."""
        found = [op for op in writes if op is not None]
        return tf.group(*found) if found else None


def send_values(
    jobs: Jobs, numbers: Any, one_by_one: bool = False, changed: Mapping[int, Any] | None = None
) -> None:
    """Sends each updated part to its other holders; those first that are ready first.

    Args:
        jobs: The jobs.
        numbers: Of those that have updated something.
        one_by_one: Whether values travel bucket by bucket, to save memory.
        changed: By job that has updated some rows of a table alone, their numbers.
    """
    changed = changed or {}
    order = OneByOne() if one_by_one else AnyOrder()
    load: Counter[Coordinate] = Counter()
    updated = {n for number in numbers for n in jobs.jobs[number].units}
    for bucket in reversed(jobs.buckets):
        units = {n for each in bucket.units for n in each}
        if units <= updated:
            if bucket.on_host:
                _send_from_host(jobs, bucket, order)
            elif jobs.units[bucket.units[0][0]].span is None:
                _send_bucket(jobs, bucket, order)
            else:
                _send_rows(jobs, RowParts.of_bucket(jobs, bucket), order, load)
            updated -= units
    for numbers in _families(jobs, updated):
        unit = jobs.units[numbers[0]]
        if unit.shard is not None and all(jobs.of[n] in changed for n in numbers):
            _send_changed(jobs, numbers, changed, order)
        elif unit.span is None:
            _send_unit(jobs, unit, jobs.jobs[jobs.of[numbers[0]]].variable, order)
        else:
            _send_rows(jobs, RowParts.of_units(jobs, numbers), order, load)


def _families(jobs: Jobs, units: Iterable[int]) -> list[list[int]]:
    """Units, those that are rows of one shard together; the last parameters first."""
    families: dict[Any, list[int]] = {}
    for n in sorted(units, reverse=True):
        unit = jobs.units[n]
        key = n if unit.span is None else (unit.variable, unit.shard)
        families.setdefault(key, []).append(n)
    return list(families.values())


def _in_order(jobs: Jobs, numbers: Iterable[int]) -> list[int]:
    """Units of one shard, those first that begin first in it."""
    return sorted(numbers, key=lambda n: jobs.units[n].span or ())


def _send_unit(jobs: Jobs, unit: UpdateUnit, source: keras.Variable, order: AnyOrder) -> None:
    entry = jobs.entries[unit.variable]
    writes: list[Any] = []
    with tf.device(jobs.device(unit.owner)), order.gate(EVERYWHERE):
        value = order.leaving(source.value)
    targets = {at: local for at, local in entry.locals.items() if local is not source}
    if unit.shard is not None:
        table = entry.placement.table
        targets = {at: to for at, to in targets.items() if table[at[0]][at[1]] == unit.shard}
    if unit.replicated:
        targets = {at: to for at, to in targets.items() if at[0] == unit.owner[0]}
    with order.gate(EVERYWHERE):
        devices = [entry.device(at) for at in targets]
        sent = Routed(value, jobs.device(unit.owner), unit.algorithm, devices)
    for at, local in targets.items():
        shard = entry.placement.table[at[0]][at[1]]
        if unit.shard is None:
            with tf.device(jobs.device(unit.owner)):
                part = value[entry.placement.shards[shard].index]
            with tf.device(entry.device(at)):
                writes.append(keras_trainer.write(local, part))
        else:
            with tf.device(entry.device(at)):
                writes.append(keras_trainer.write(local, sent.at(entry.device(at))))
    if writes:
        order.arrived(EVERYWHERE, writes)


@dataclasses.dataclass(frozen=True)
class RowParts:
    """Shards whose rows were updated by several owners.

    Attributes:
        members: Position of each parameter.
        owners: Who updated the rows, first rows first.
        holders: Who stores the shards.
        part: Per owner, its rows of all members.
        joined: Puts the owners' parts together, as one tensor.
        split: From that to a tensor per member.
        nbytes: Of all of it.
        algorithm: How it goes between processes.
    """

    members: tuple[int, ...]
    owners: tuple[Coordinate, ...]
    holders: tuple[Coordinate, ...]
    part: Callable[[int], Any]
    joined: Callable[[list[Any]], Any]
    split: Callable[[Any], list[Any]]
    nbytes: int
    algorithm: str

    @classmethod
    def of_bucket(cls, jobs: Jobs, bucket: Bucket) -> RowParts:
        """The rows of a bucket."""
        return cls(
            bucket.members,
            bucket.owners,
            tuple(sorted({at for each in bucket.holders for at in each})),
            lambda p: vector_of(jobs, bucket, bucket.units[p]),
            tf.stack,
            bucket.split,
            sum(jobs.nbytes(n) for each in bucket.units for n in each),
            bucket.algorithm,
        )

    @classmethod
    def of_units(cls, jobs: Jobs, numbers: Sequence[int]) -> RowParts:
        """The rows of one shard, updated apart."""
        numbers = _in_order(jobs, numbers)
        first = jobs.units[numbers[0]]
        assert first.shard is not None
        return cls(
            (first.variable,),
            tuple(jobs.units[n].owner for n in numbers),
            jobs.entries[first.variable].placement.shards[first.shard].holders,
            lambda p: jobs.jobs[jobs.of[numbers[p]]].variable.value,
            lambda parts: tf.concat(parts, first.dim),
            lambda whole: [whole],
            sum(jobs.nbytes(n) for n in numbers),
            first.algorithm,
        )


def _send_rows(jobs: Jobs, sent: RowParts, order: AnyOrder, load: Counter[Coordinate]) -> None:
    """Puts rows together on one of their owners, the least loaded, and sends the whole from there.

    Against an all-gather, 2 (n - 1) messages in place of n (n - 1), one write in place of n where
    devices share their memory, and one part in n more bytes.
    """
    parts = [_leaving_part(jobs, sent, p, order) for p in range(len(sent.owners))]
    root = min(sent.owners, key=lambda at: (load[at], at))
    load[root] += sent.nbytes
    with tf.device(jobs.device(root)):
        devices = [jobs.device(at) for at in sent.holders]
        joined = Routed(_join(sent, parts), jobs.device(root), sent.algorithm, devices)
    writes: list[Any] = []
    for at in sent.holders:
        locals_ = [jobs.entries[v].locals[at] for v in sent.members]
        with tf.device(jobs.device(at)):
            values = sent.split(joined.at(jobs.device(at)))
            writes += map(keras_trainer.write, locals_, values)
    with tf.device(jobs.device(root)):
        order.arrived(EVERYWHERE, [order.all_of(writes)])


def _leaving_part(jobs: Jobs, sent: RowParts, p: int, order: AnyOrder) -> Any:
    with tf.device(jobs.device(sent.owners[p])), order.gate(EVERYWHERE):
        return tf.identity(order.leaving(sent.part(p)))


def _join(sent: RowParts, parts: list[Any]) -> Any:
    return sent.joined(parts)


def _send_changed(
    jobs: Jobs, numbers: Sequence[int], changed: Mapping[int, Any], order: AnyOrder
) -> None:
    """Sends the rows of a shard that its owners have changed, from one of them.

    There they are put together, as by `_send_rows`. How many there are shows when a step runs.
    """
    numbers = _in_order(jobs, numbers)
    first = jobs.units[numbers[0]]
    assert first.shard is not None
    entry = jobs.entries[first.variable]
    holders = entry.placement.shards[first.shard].holders
    if len(holders) == 1:
        return
    parts = [_changed_rows(jobs, jobs.units[n], changed[jobs.of[n]], order) for n in numbers]
    place = first.variable % len(numbers)
    root = jobs.units[numbers[place]].owner
    with tf.device(jobs.device(root)):
        if first.dim:  # all have parts of the same rows
            joined = [parts[place][0], tf.concat([values for _, values in parts], first.dim)]
        else:
            joined = [p[0] if len(p) == 1 else tf.concat(p, 0) for p in zip(*parts)]
        sent = [Sent(value, jobs.device(root)) for value in joined]
    writes = []
    for at in holders:
        if at != root or len(parts) > 1:
            with tf.device(jobs.device(at)):
                rows, values = (one.at(jobs.device(at)) for one in sent)
                writes.append(keras_trainer.write_rows(entry.locals[at], rows, values))
    with tf.device(jobs.device(root)):
        order.arrived(EVERYWHERE, [order.all_of(writes)])


def _changed_rows(jobs: Jobs, unit: UpdateUnit, indices: Any, order: AnyOrder) -> tuple[Any, Any]:
    """Numbers, each once, and new values of the rows of a shard that an owner has changed."""
    part: Index = () if unit.span is None else jobs.own_part(unit)
    with tf.device(jobs.device(unit.owner)), order.gate(EVERYWHERE):
        rows, _ = tf.unique(indices)
        if part:
            rows += tf.cast(part[0].start, rows.dtype)
        local = keras_trainer.tf_variable(jobs.entries[unit.variable].locals[unit.owner])
        values = tf.gather(local, rows)
        return rows, order.leaving(values[(slice(None), *part[1:])] if part[1:] else values)


def _send_bucket(jobs: Jobs, bucket: Bucket, order: AnyOrder) -> None:
    """Sends a bucket's new values from their owners to the other holders of each shard."""
    vectors = []
    for at, units in zip(bucket.owners, bucket.units):
        with tf.device(jobs.device(at)), order.gate(_where(jobs, bucket, at)):
            vectors.append(order.leaving(vector_of(jobs, bucket, units)))
    writes: dict[str, list[Any]] = {}
    for vector, owner, holders in zip(vectors, bucket.owners, bucket.holders):
        others = sorted(set(holders) - set(bucket.owners))
        with order.gate(_where(jobs, bucket, owner)):
            devices = [jobs.device(at) for at in others]
            sent = Routed(vector, jobs.device(owner), bucket.algorithm, devices)
        for at in others:
            locals_ = [jobs.entries[v].locals[at] for v in bucket.members]
            where = _where(jobs, bucket, at)
            with tf.device(jobs.device(at)), order.gate(where):
                value = sent.at(jobs.device(at))
                written = map(keras_trainer.write, locals_, bucket.pieces(value))
                writes.setdefault(where, []).extend(written)
    for where, operations in writes.items():
        order.arrived(where, operations)


def _send_from_host(jobs: Jobs, bucket: Bucket, order: AnyOrder) -> None:
    """Sends each holder, as one message, what it stores of the members of a bucket."""
    host = jobs.device(bucket.owners[0])
    placements = [jobs.entries[v].placement for v in bucket.members]
    with tf.device(host), order.gate(EVERYWHERE):
        values = [order.leaving(jobs.jobs[jobs.of[n]].variable.value) for n in bucket.units[0]]
    sent: dict[Any, Sent] = {}
    writes: list[Any] = []
    for at in bucket.holders[0]:
        shards = shards_at(placements, at)
        key = tuple(shard.holders for shard in shards)
        if key not in sent:
            with tf.device(host):
                parts = [value[shard.index] for value, shard in zip(values, shards)]
                sent[key] = Sent(flat(parts), host)
        with tf.device(jobs.device(at)):
            pieces = unflat(sent[key].at(jobs.device(at)), [shard.shape for shard in shards])
            locals_ = [jobs.entries[v].locals[at] for v in bucket.members]
            writes += map(keras_trainer.write, locals_, pieces)
    order.arrived(EVERYWHERE, writes)


def _where(jobs: Jobs, bucket: Bucket, at: Coordinate) -> str:
    """What a coordinate waits for: an owner that gets nothing does not know how far others are."""
    return jobs.device(at) if len(bucket.owners) > 1 else EVERYWHERE


def vector_of(jobs: Jobs, bucket: Bucket, units: Sequence[int]) -> Any:
    """An owner's values of a bucket."""
    variables = [jobs.jobs[jobs.of[n]].variable for n in units]
    if bucket.flat:
        return tf.convert_to_tensor(variables[0].value)
    return flat([v.value for v in variables])
