"""The distributed update: reduce gradients to their owners, update there, send values back.

Runs inside one `tf.function` over all local devices. Communication is `add_n` on the owner's
device and an assignment on each holder's: 2.4 to 8 times cheaper in one process than collective
ops, differentiable, and unable to deadlock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kdist import _private
from kdist.mesh import Topology
from kdist.optimizer.bucket import Bucket, flat_view, make_buckets
from kdist.optimizer.local import (
    LocalOptimizer,
    Span,
    leaf_optimizers,
    link_slots,
    needs_whole,
)
from kdist.optimizer.source import GradientSource, bucket_gradients
from kdist.optimizer.wrappers import unwrap
from kdist.placement import Coordinate, Index, UpdateUnit, covers, relative
from kdist.variables import Rows, Stored, backing_of, make_local, rows_view

import keras
import tensorflow as tf
from keras import ops


def optimizer_groups(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> list[tuple[Any, list[int]]]:
    """The optimizers that do math, each with the positions of its variables; none without one."""
    return [] if optimizer is None else leaf_optimizers(unwrap(optimizer).inner, variables)


def whole_updates(optimizer: Any, variables: Sequence[keras.Variable]) -> list[bool]:
    """Per variable, whether its update must see the whole tensor; see `needs_whole`."""
    whole = [False] * len(variables)
    for leaf, members in optimizer_groups(optimizer, variables):
        for v in members:
            whole[v] = needs_whole(leaf, variables[v])
    return whole


@dataclasses.dataclass(frozen=True)
class Job:
    """What a local optimizer sees as one variable.

    Attributes:
        variable: The local variable: a unit's part, or a flat bucket's vector.
        owner: Where it is updated.
        units: Numbers of the update units.
        flat: Whether it is a vector.
    """

    variable: keras.Variable
    owner: Coordinate
    units: tuple[int, ...]
    flat: bool = False


class DistributedUpdate:
    """Applies globally reduced gradients with the user's optimizer.

    Args:
        optimizer: The compiled, built optimizer.
        entries: `Stored` of each trainable variable, in the model's order.
        topology: The mesh.
        units: Who updates which part.
        keys: Per variable the key of its bucket; see `make_buckets`.
    """

    def __init__(
        self,
        optimizer: Any,
        entries: Sequence[Stored],
        topology: Topology,
        units: Sequence[UpdateUnit],
        keys: Sequence[Hashable | None],
    ) -> None:
        self.topology = topology
        self.entries = list(entries)
        wrappers = unwrap(optimizer)
        self.loss_scale = wrappers.loss_scale
        self.inner = wrappers.inner
        variables = [entry.variable for entry in entries]
        self._refuse_overwritten(variables)
        self.groups = leaf_optimizers(self.inner, variables)
        self.units = tuple(units)
        self._keys = tuple(keys)
        self._whole = whole_updates(optimizer, variables)
        self._build(frozenset())
        self._override_finalize()

    def _build(self, unfused: frozenset[int]) -> None:
        """Makes the local optimizers, and moves the state of those there were into them."""
        self.unfused = unfused
        for entry in self.entries:
            entry.masters.clear()  # of an optimizer that was compiled before
        keys = [None if v in unfused else key for v, key in enumerate(self._keys)]
        placements = [entry.placement for entry in self.entries]
        self.buckets = make_buckets(self.units, placements, keys, self._whole)
        self.jobs = self._make_jobs()
        self.local = [self._build_local(leaf, members) for leaf, members in self.groups]

    def _make_jobs(self) -> list[Job]:
        """What the local optimizers see as one variable each: units, and buckets' vectors."""
        jobs = [
            Job(self._flat_variable(bucket, p), bucket.owners[p], units, flat=True)
            for bucket in self.buckets
            if bucket.flat
            for p, units in enumerate(bucket.units)
        ]
        fused = {n for job in jobs for n in job.units}
        for n, unit in enumerate(self.units):
            if n not in fused:
                jobs.append(Job(self._unit_variable(unit), unit.owner, (n,)))
        self._job_of = {n: j for j, job in enumerate(jobs) for n in job.units}
        return jobs

    def _flat_variable(self, bucket: Bucket, p: int) -> keras.Variable:
        at = bucket.owners[p]
        parts = []
        for v, n in zip(bucket.members, bucket.units[p]):
            unit = self.units[n]
            rows = None if unit.rows is None else self._own_rows(unit)[0]
            parts.append((self.entries[v].locals[at], rows))
        with tf.device(self._device(at)):
            return flat_view(self.entries[bucket.members[0]].variable, parts)

    @staticmethod
    def _refuse_overwritten(variables: Sequence[keras.Variable]) -> None:
        for v in variables:
            if v.overwrite_with_gradient:
                raise ValueError(
                    "Variables that are overwritten by their gradient (float8 training) cannot be "
                    "summed over replicas. Use mixed_bfloat16 instead. "
                    f"Received: variable={v.path!r}"
                )

    def _unit_variable(self, unit: UpdateUnit) -> keras.Variable:
        """The local variable that the optimizer updates for a unit.

        The owner's own shard, or rows of it, or, for an update that needs the whole of a cut
        tensor, a whole copy kept on the owner.
        """
        entry = self.entries[unit.variable]
        if unit.shard is not None:
            local = entry.locals[unit.owner]
            if unit.rows is not None:
                with tf.device(entry.device(unit.owner)):
                    local = rows_view(entry.variable, local, self._own_rows(unit))
        else:
            device = entry.device(unit.owner)
            with tf.device(device):
                local = make_local(entry.variable, tf.identity(entry.whole()))
            entry.masters.append((device, local))
        if entry.variable.constraint is not None:
            local.constraint = entry.variable.constraint
        return local

    def _build_local(self, leaf: Any, members: list[int]) -> list[LocalOptimizer]:
        by_owner: dict[Coordinate, list[int]] = {}
        for n, job in enumerate(self.jobs):
            if self.units[job.units[0]].variable in members:
                by_owner.setdefault(job.owner, []).append(n)
        local = [
            LocalOptimizer(
                leaf,
                self._device(at),
                numbers,
                [self.jobs[n].variable for n in numbers],
                [self._logical(self.jobs[n]) for n in numbers],
            )
            for at, numbers in sorted(by_owner.items())
        ]
        where = {v: i for i, v in enumerate(members)}
        link_slots(leaf, local, [self._spans(job, where) for job in self.jobs], len(members))
        return local

    def _logical(self, job: Job) -> keras.Variable:
        return self.entries[self.units[job.units[0]].variable].variable

    def _spans(self, job: Job, where: dict[int, int]) -> list[Span]:
        """Which parts of which variables a job's state stands for."""
        spans, start = [], 0
        for n in job.units:
            unit = self.units[n]
            position = where.get(unit.variable, -1)
            index = unit.index(self.entries[unit.variable].placement)
            shape = tuple(i.stop - i.start for i in index)
            spans.append(Span(position, self._index(unit), start if job.flat else None, shape))
            start += math.prod(shape)
        return spans

    def _index(self, unit: UpdateUnit) -> Any:
        placement = self.entries[unit.variable].placement
        index = unit.index(placement)
        return None if covers(index, placement.shape) else index

    def _own_rows(self, unit: UpdateUnit) -> Index:
        """The unit's rows, counted inside its shard."""
        assert unit.shard is not None
        placement = self.entries[unit.variable].placement
        return relative(unit.index(placement)[:1], placement.shards[unit.shard].index[:1])

    def _override_finalize(self) -> None:
        """Writing EMA averages back goes through the logical variables, to reach every copy."""

        def overwrite(leaf: Any) -> Callable[[Any], None]:
            def write(variables: Sequence[keras.Variable]) -> None:
                averages = leaf._model_variables_moving_average
                for variable, average in zip(variables, averages):
                    if average is not None:
                        variable.assign(average)

            return write

        for leaf, _ in self.groups:
            object.__setattr__(
                leaf, "_overwrite_model_variables_with_average_value", overwrite(leaf)
            )

    def scale(self) -> Any:
        """What the loss is multiplied by before differentiation, or None for 1."""
        if self.loss_scale is not None:
            return tf.convert_to_tensor(self.loss_scale.dynamic_scale.value)
        return self.inner.loss_scale_factor

    def apply(self, source: GradientSource, connected: Sequence[int]) -> None:
        """Updates every parameter, everywhere.

        Args:
            source: The slices' gradients.
            connected: Positions of the trainable variables that have a gradient.
        """
        live = set(connected)
        fused = {v for bucket in self.buckets for v in bucket.members}
        if wrong := {v for v in fused if v not in live or v in source.rows}:
            # Known only now: rows stay rows, and Keras passes over what has no gradient.
            with tf.init_scope():
                self._build(self.unfused | wrong)
        gradients = self._gradients(source, live)
        if self.loss_scale is None:
            self._apply(gradients)
            return
        finite = self._all_finite(gradients)
        tf.cond(finite, lambda: self._apply_unscaled(gradients), self._skip)

    def _gradients(self, source: GradientSource, live: set[int]) -> dict[int, Any]:
        """What each job's variable is updated with: number of the job -> gradient."""
        gradients: dict[int, Any] = {}
        devices = [one.devices for one in self.topology.slices]
        for bucket in self.buckets:
            vectors = bucket_gradients(bucket, source, devices)
            for at, units, vector in zip(bucket.owners, bucket.units, vectors):
                if bucket.flat:
                    gradients[self._job_of[units[0]]] = vector
                    continue
                with tf.device(self._device(at)):
                    pieces = bucket.pieces(vector)
                gradients.update((self._job_of[n], piece) for n, piece in zip(units, pieces))
        for n, job in enumerate(self.jobs):
            unit = self.units[job.units[0]]
            if job.flat:
                backing_of(job.variable).forget()
            elif n not in gradients and unit.variable in live:
                with tf.device(self._device(job.owner)):
                    gradients[n] = source.unit(unit.variable, unit)
        return gradients

    def _device(self, at: Coordinate) -> str:
        return self.topology.slices[at[0]].devices[at[1]]

    def _all_finite(self, gradients: dict[int, Any]) -> Any:
        """One overflow anywhere makes it False everywhere."""
        flags = []
        for n, gradient in gradients.items():
            with tf.device(self._device(self.jobs[n].owner)):
                flags.append(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(gradient))))
        return tf.reduce_all(tf.stack(flags))

    def _apply_unscaled(self, gradients: dict[int, Any]) -> None:
        scale = self.loss_scale.dynamic_scale
        unscaled = {}
        for n, gradient in gradients.items():
            with tf.device(self._device(self.jobs[n].owner)):
                unscaled[n] = ops.divide(gradient, scale)
        self._apply(unscaled)

        def upscale() -> None:
            self.loss_scale.step_counter.assign(0)
            self.loss_scale.dynamic_scale.assign(ops.multiply(self.loss_scale.dynamic_scale, 2.0))

        def increment() -> None:
            self.loss_scale.step_counter.assign_add(1)

        last = ops.equal(self.loss_scale.step_counter, self.loss_scale.dynamic_growth_steps - 1)
        ops.cond(last, upscale, increment)

    def _skip(self) -> None:
        self.loss_scale.step_counter.assign(0)
        self.loss_scale.dynamic_scale.assign(ops.multiply(self.loss_scale.dynamic_scale, 0.5))

    def _apply(self, gradients: dict[int, Any]) -> None:
        for (leaf, _), local in zip(self.groups, self.local):
            self._clip_globally(leaf, local, gradients)
            for one in local:
                live = [(n, v) for n, v in zip(one.positions, one.variables) if n in gradients]
                with tf.device(one.device):
                    if live:
                        one.apply([gradients[n] for n, _ in live], [v for _, v in live])
                    else:
                        one.iterations().assign_add(1)
        if self.inner not in [leaf for leaf, _ in self.groups]:
            self.inner._iterations.assign_add(1)
        overwritten = any(leaf.use_ema for leaf, _ in self.groups)
        self._broadcast(range(len(self.jobs)) if overwritten else gradients)

    def _clip_globally(
        self, leaf: Any, local: Sequence[LocalOptimizer], gradients: dict[int, Any]
    ) -> None:
        """Gives each local optimizer the norm of the whole gradient to clip by."""
        if not (leaf.global_clipnorm and leaf.global_clipnorm > 0):
            return
        squares = []
        for one in local:
            with tf.device(one.device):
                for n, variable in zip(one.positions, one.variables):
                    if n in gradients:
                        gradient = self._update_gradient(leaf, one, variable, gradients[n])
                        squares.append(ops.sum(ops.square(gradient)))
        norm = ops.sqrt(ops.sum(ops.stack(squares)))
        clip = leaf.global_clipnorm
        factor = clip * ops.minimum(1.0 / norm, 1.0 / clip) + (norm - norm)
        for one in local:
            object.__setattr__(
                one.optimizer,
                "_clip_gradients",
                lambda gs: [
                    g if g is None else ops.multiply(g, ops.cast(factor, g.dtype)) for g in gs
                ],
            )

    @staticmethod
    def _update_gradient(
        leaf: Any, one: LocalOptimizer, variable: keras.Variable, gradient: Any
    ) -> Any:
        """The gradient that the optimizer clips: unscaled, with what was accumulated."""
        if leaf.loss_scale_factor is not None:
            gradient = ops.divide(gradient, leaf.loss_scale_factor)
        accumulated = _private.accumulator(one.optimizer, variable)
        if accumulated is None:
            return gradient
        return ops.divide(ops.add(gradient, accumulated), leaf.gradient_accumulation_steps)

    def _broadcast(self, numbers: Any) -> None:
        """Sends each updated part to its other holders."""
        updated = {n for number in numbers for n in self.jobs[number].units}
        for bucket in self.buckets:
            units = {n for each in bucket.units for n in each}
            if units <= updated:
                self._gather_bucket(bucket)
                updated -= units
        for n in sorted(updated):
            self._broadcast_unit(self.units[n], self.jobs[self._job_of[n]].variable)

    def _broadcast_unit(self, unit: UpdateUnit, source: keras.Variable) -> None:
        entry = self.entries[unit.variable]
        with tf.device(self._device(unit.owner)):
            value = tf.convert_to_tensor(source.value)
        for at, local in entry.locals.items():
            shard = entry.placement.table[at[0]][at[1]]
            if local is source or (unit.shard is not None and unit.shard != shard):
                continue
            if unit.shard is None:
                with tf.device(self._device(unit.owner)):
                    part = value[entry.placement.shards[shard].index]
                with tf.device(entry.device(at)):
                    local.assign(part)
            elif unit.rows is None:
                with tf.device(entry.device(at)):
                    local.assign(value)
            elif at != unit.owner:
                (rows,) = self._own_rows(unit)
                with tf.device(entry.device(at)):
                    Rows(local, rows.start, rows.stop).assign(value)

    def _gather_bucket(self, bucket: Bucket) -> None:
        """Sends a bucket's new values from their owners to the other holders.

        Members that are stored cut have nothing to gather: only other holders of a shard get it.
        """
        vectors = []
        for at, units in zip(bucket.owners, bucket.units):
            with tf.device(self._device(at)):
                vectors.append(self._vector(bucket, units))
        rows = self.units[bucket.units[0][0]].rows is not None
        holders = sorted({at for each in bucket.holders for at in each})
        for at in holders:
            if at in bucket.owners and not rows:
                continue
            locals_ = [self.entries[v].locals[at] for v in bucket.members]
            with tf.device(self._device(at)):
                if rows:
                    values = bucket.split(tf.stack(vectors))
                else:
                    (p,) = (p for p, each in enumerate(bucket.holders) if at in each)
                    values = bucket.pieces(vectors[p])
                for local, value in zip(locals_, values):
                    local.assign(value)

    def _vector(self, bucket: Bucket, units: Sequence[int]) -> Any:
        """An owner's values of a bucket."""
        variables = [self.jobs[self._job_of[n]].variable for n in units]
        if bucket.flat:
            return tf.convert_to_tensor(variables[0].value)
        return tf.concat([tf.reshape(v.value, [-1]) for v in variables], 0)
