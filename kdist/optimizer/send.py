"""New values go from their owners to the other holders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.optimizer.bucket import Bucket
from kdist.optimizer.jobs import Jobs
from kdist.placement import UpdateUnit
from kdist.variables import Rows

import keras
import tensorflow as tf


def send_values(jobs: Jobs, numbers: Any) -> None:
    """Sends each updated part to its other holders."""
    updated = {n for number in numbers for n in jobs.jobs[number].units}
    for bucket in jobs.buckets:
        units = {n for each in bucket.units for n in each}
        if units <= updated:
            _send_bucket(jobs, bucket)
            updated -= units
    for n in sorted(updated):
        _send_unit(jobs, jobs.units[n], jobs.jobs[jobs.of[n]].variable)


def _send_unit(jobs: Jobs, unit: UpdateUnit, source: keras.Variable) -> None:
    entry = jobs.entries[unit.variable]
    with tf.device(jobs.device(unit.owner)):
        value = tf.convert_to_tensor(source.value)
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
                local.assign(part)
        elif unit.rows is None:
            with tf.device(entry.device(at)):
                local.assign(value)
        elif at != unit.owner:
            (rows,) = jobs.own_rows(unit)
            with tf.device(entry.device(at)):
                Rows(local, rows.start, rows.stop).assign(value)


def _send_bucket(jobs: Jobs, bucket: Bucket) -> None:
    """Sends a bucket's new values from their owners to the other holders.

    Members that are stored cut have nothing to gather: only other holders of a shard get it.
    """
    vectors = []
    for at, units in zip(bucket.owners, bucket.units):
        with tf.device(jobs.device(at)):
            vectors.append(vector_of(jobs, bucket, units))
    rows = jobs.units[bucket.units[0][0]].rows is not None
    holders = sorted({at for each in bucket.holders for at in each})
    for at in holders:
        if at in bucket.owners and not rows:
            continue
        locals_ = [jobs.entries[v].locals[at] for v in bucket.members]
        with tf.device(jobs.device(at)):
            if rows:
                values = bucket.split(tf.stack(vectors))
            else:
                (p,) = (p for p, each in enumerate(bucket.holders) if at in each)
                values = bucket.pieces(vectors[p])
            for local, value in zip(locals_, values):
                local.assign(value)


def vector_of(jobs: Jobs, bucket: Bucket, units: Sequence[int]) -> Any:
    """An owner's values of a bucket."""
    variables = [jobs.jobs[jobs.of[n]].variable for n in units]
    if bucket.flat:
        return tf.convert_to_tensor(variables[0].value)
    return tf.concat([tf.reshape(v.value, [-1]) for v in variables], 0)
