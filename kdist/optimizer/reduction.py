"""Summing a step's gradients over the slices, as they become complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from kdist.optimizer.accumulate import LocalSums
from kdist.optimizer.compressed import bucket_vectors
from kdist.optimizer.gradients import GradientSource
from kdist.optimizer.update_jobs import Jobs
from kdist.plan.bucket import Bucket
from kdist.sharding.placement import Coordinate
from kdist.storage.row_views import RowsBacking
from kdist.storage.transfer import apart
from kdist.storage.variables import backing_of

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Round:
    """Sums that were made together.

    Attributes:
        sums: The operations that made them.
        used: Variables whose earlier sums are used, and new values written, before.
    """

    sums: tuple[tf.Operation, ...]
    used: frozenset[int]


class Reduction:
    """The sums of one step's gradients.

    Args:
        jobs: What each device updates.
        source: The slices' gradients.
        connected: Trainable variables that have a gradient.
        live: Those of them that are summed over the slices.
        scale: What the gradients are multiplied by, None for 1.
        sums: By number of the optimizer, what accumulates the gradients of its other variables
            where they are made; as soon as they are complete.
        compress: Whether gradients travel compressed, where that was asked for.
        frees: Whether gradients are to be freed once they are summed.

    Attributes:
        gradients: Number of the job -> what its variable is updated with.
        accumulated: Variables whose gradients have been accumulated.
        rounds: What was summed, one after the other.
    """

    def __init__(
        self,
        jobs: Jobs,
        source: GradientSource,
        connected: Collection[int],
        live: Collection[int],
        scale: Any,
        sums: Mapping[int, LocalSums] | None = None,
        compress: bool = True,
        frees: bool = False,
    ) -> None:
        self._frees = frees
        self.jobs, self.given = jobs, source
        self.connected, self.live = set(connected), set(live)
        self.sums = dict(sums or {})
        self.compress = compress
        self._compressed = jobs.compressed(source, scale) if compress else None
        self.source = source if self._compressed is None else self._compressed
        self.gradients: dict[int, Any] = {}
        self.accumulated: set[int] = set()
        self.rounds: list[Round] = []
        self._together = [self.live.intersection(one.members) for one in jobs.exchanges]
        # A vector is updated as a whole, with zeros for what has no gradient.
        self._buckets = [
            one
            for one in jobs.buckets
            if self.live.issuperset(one.members) or (one.flat and self.live & set(one.members))
        ]
        fused = {n for one in self._buckets for units in one.units for n in units}
        self._alone = [
            n
            for n, job in enumerate(jobs.jobs)
            if not job.flat and fused.isdisjoint(job.units) and jobs.variable(job) in self.live
        ]
        for job in jobs.jobs:
            backing = backing_of(job.variable)
            if isinstance(backing, RowsBacking):
                backing.forget()

    def keep(self) -> None:
        """Keeps the state of compression for the next step."""
        if self._compressed is not None:
            self._compressed.commit()

    def advance(self, complete: Collection[int], used: Collection[int] = ()) -> list[tf.Operation]:
        """Sums what can be summed by now.

        Args:
            complete: Trainable variables whose gradients every slice has.
            used: See `Round`.

        Returns:
            The operations that make the new sums.
        """
        complete = set(complete)
        late = {v for members in self._together if not members <= complete for v in members}
        ready = complete - late
        made = self._accumulate(complete)
        for bucket in [one for one in self._buckets if ready >= self.live & set(one.members)]:
            self._buckets.remove(bucket)
            made += self._sum_bucket(bucket)
        for n in [n for n in self._alone if self.jobs.variable(self.jobs.jobs[n]) in ready]:
            self._alone.remove(n)
            made.append(self._sum_unit(n))
        if self._compressed is not None:
            made += self._compressed.last_uses
            self._compressed.last_uses.clear()
        if tf.executing_eagerly():
            return []
        operations = [(t.values if isinstance(t, tf.IndexedSlices) else t).op for t in made]
        self.rounds.append(Round(tuple(operations), frozenset(used)))
        return operations

    def _accumulate(self, complete: set[int]) -> list[Any]:
        made = []
        for sums in self.sums.values():
            fresh = [v for v in sorted(complete - self.accumulated) if v in sums.sums]
            self.accumulated.update(fresh)
            made += sums.add(self.given, fresh, None)
        return made

    def _sum_bucket(self, bucket: Bucket) -> list[Any]:
        live = None if self.live.issuperset(bucket.members) else self.live
        vectors = bucket_vectors(bucket, self.source, self.jobs.topology, live)
        if self._frees and len(bucket.owners) > 1:
            vectors = list(map(self._apart, bucket.owners, vectors))
        for at, units, vector in zip(bucket.owners, bucket.units, vectors):
            if bucket.flat:
                self.gradients[self.jobs.of[units[0]]] = vector
                continue
            with tf.device(self.jobs.device(at)):
                pieces = bucket.pieces(vector)
            self.gradients.update((self.jobs.of[n], piece) for n, piece in zip(units, pieces))
        return vectors

    def _sum_unit(self, number: int) -> Any:
        job = self.jobs.jobs[number]
        with tf.device(self.jobs.device(job.owner)):
            unit = self.jobs.units[job.units[0]]
            found = self.source.unit(unit.variable, unit)
        if self._frees and unit.span is not None and not isinstance(found, tf.IndexedSlices):
            found = self._apart(job.owner, found)
        self.gradients[number] = found
        return found

    def _apart(self, owner: Coordinate, total: Any) -> Any:
        """A sum of parts of gradients, which does not hold on to a whole gradient."""
        with tf.device(self.jobs.device(owner)):
            return apart(total)
