"""The distributed update: reduce gradients to their owners, update there, send values back.

Runs inside one `tf.function` over all devices of the mesh. Communication is `add_n` on the owner's
device and an assignment on each holder's (between processes as `FusionConfig(algorithm=...)` says):
edges of a graph, so there is no order of collectives to agree on, and nothing that can deadlock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from kdist._compat import function_graphs, keras_averages, keras_optimizers
from kdist.config.compression import Classes
from kdist.config.optimizer import OptimizerConfig
from kdist.config.state_format import slot_formats
from kdist.graphs.instantiation import instantiated_cheaply
from kdist.layers.lazy import Lazy, rows_summed, values_of
from kdist.optimizer.accumulate import LocalSums
from kdist.optimizer.broadcast import send_values
from kdist.optimizer.clip import clip_globally
from kdist.optimizer.compressed import KnownStates
from kdist.optimizer.gradients import GradientSource
from kdist.optimizer.local import leaf_optimizers
from kdist.optimizer.loss_scale import LossScale
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.update_jobs import Jobs
from kdist.optimizer.when_due import held_by, is_due, send_what_changed, waiting
from kdist.optimizer.wrappers import row_updates, unwrap, whole_updates
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate
from kdist.storage.overwritten import overwritten
from kdist.storage.row_views import RowsBacking
from kdist.storage.sparse import is_sparse
from kdist.storage.variables import Stored, backing_of

import tensorflow as tf
from keras import ops


class DistributedUpdate:
    """Applies globally reduced gradients with the user's optimizer.

    Args:
        optimizer: The compiled, built optimizer.
        entries: `Stored` of each trainable variable, in the model's order.
        topology: The mesh.
        units: Who updates which part.
        keys: Per variable the key of its bucket; see `make_buckets`.
        config: Level, how gradients accumulate, formats of the optimizer's moments.
        classes: How the gradient of each variable travels; None for all as they are.
        low_rank: What low-rank compression keeps, by whoever makes one update after the other.
        model: Whose weights they are: of models that share some, each has updates of its own.

    Raises:
        ValueError: `config.state_format` does not apply to the optimizer; see `slot_formats`.
    """

    def __init__(
        self,
        optimizer: Any,
        entries: Sequence[Stored],
        topology: Topology,
        units: Sequence[UpdateUnit],
        keys: Sequence[Hashable | None],
        config: OptimizerConfig,
        classes: Classes | None = None,
        low_rank: KnownStates | None = None,
        model: Any = None,
    ) -> None:
        wrappers = unwrap(optimizer)
        self.loss_scale = LossScale(wrappers.loss_scale) if wrappers.loss_scale else None
        self.inner = wrappers.inner
        variables = [entry.variable for entry in entries]
        self.groups = leaf_optimizers(self.inner, variables)
        for leaf, _ in self.groups:
            slot_formats(leaf, config.state_format)  # refuses before anything is changed
        low_rank = {} if low_rank is None else low_rank
        self.jobs = Jobs(
            entries, topology, units, self.groups, config.state_format, classes, low_rank, model
        )
        self._keys = tuple(keys)
        self._whole = whole_updates(optimizer, variables)
        self.row_updates = row_updates(optimizer, variables)
        near = config.level > 0 and config.state_on == "device"
        self._sum_locally = near and not config.gradient_accumulation_shard
        # Gradients that are freed, and values that leave one after the other, take less memory.
        self.one_by_one = config.level >= 2
        self.sums: dict[int, LocalSums] = {}
        # Of a penalty, as large as the table: accumulated where the table is.
        self._fetched = {v for v, entry in enumerate(entries) if entry.placement.fetched}
        # What overwrites a variable is no sum, and Keras accumulates it by the largest.
        self._overwritten = overwritten(variables)
        self._unfused: frozenset[int] = frozenset()
        self._has_updated = False
        self.jobs.build(keys, self._whole)
        for leaf, _ in self.groups:
            keras_averages.overwrite_by_assign(leaf)

    def scale(self) -> Any:
        """What the loss is multiplied by before differentiation, or None for 1."""
        if self.loss_scale is not None:
            return self.loss_scale.scale()
        return self.inner.loss_scale_factor

    def whole_gradients(self, reduction: Reduction) -> dict[int, Any]:
        """The gradients that `apply` would update with, each whole, on the device in scope.

        What compression keeps moves on, unless a gradient is infinite or NaN.

        Args:
            reduction: From `begin`, without accumulating; what it has not summed yet is summed now.
        """
        reduction.advance(reduction.connected)
        sums, source = reduction.gradients, reduction.given
        if reduction.compress and self.jobs.kept:
            flags = self._are_finite(sums)
            tf.cond(tf.reduce_all(tf.stack(flags)), reduction.keep, lambda: None)
        tables = {
            v: source.unit(v, UpdateUnit(v, None, (0, 0)))
            for v in reduction.connected & source.rows
        }
        return {**self.jobs.whole(sums, reduction.connected), **tables}

    def begin(
        self,
        source: GradientSource,
        connected: Sequence[int],
        compress: bool = True,
        accumulate: bool = True,
    ) -> Reduction:
        """What sums the gradients of a step, all at once or as they become complete.

        Args:
            source: The slices' gradients.
            connected: Positions of the trainable variables that have a gradient.
            compress: Whether they travel compressed, where that was asked for.
            accumulate: Whether for an update; without, dense gradients are all summed, for
                `whole_gradients`.
        """
        live = set(connected)
        self._settle(source, live, compress)
        self._has_updated |= accumulate
        if accumulate:
            self.jobs.take(live)
        frees = self.one_by_one
        if not accumulate:
            dense = live - source.rows
            return Reduction(
                self.jobs, source, live, dense, self.scale(), compress=compress, frees=frees
            )
        self._build_sums(live - source.rows - self._fetched - self._overwritten)
        summed = {v for sums in self.sums.values() for v in sums.sums}
        # With a dynamic loss scale, it is not known yet whether the step counts.
        early = self.sums if self.loss_scale is None else {}
        return Reduction(
            self.jobs, source, live, live - summed, self.scale(), early, compress, frees
        )

    def apply(self, reduction: Reduction) -> None:
        """Updates every parameter, everywhere.

        Args:
            reduction: From `begin`; what it has not summed yet is summed now.
        """
        source, live = reduction.given, reduction.connected
        reduction.advance(live)
        direct = reduction.gradients
        self._sum_rows(direct)
        if self.loss_scale is None:
            reduction.keep()
            self._apply({**direct, **self._accumulated(reduction, None)}, live)
            return
        summed = {v for sums in self.sums.values() for v in sums.sums}
        flags = self._are_finite(direct)
        for s, one in enumerate(self.jobs.topology.slices):
            for at in ((s, k) for k in range(len(one.devices))):
                found = [source.local(v, at) for v in sorted(summed & live)]
                flags += [self._is_finite(at, g) for g in found if g is not None]
        finite = tf.reduce_all(tf.stack(flags))

        def step() -> None:
            reduction.keep()
            self._apply_unscaled(reduction)

        tf.cond(finite, step, self.loss_scale.skip)

    def _lazy(self) -> set[int]:
        """Numbers of the jobs that lazy optimizers update."""
        groups = zip(self.groups, self.jobs.local)
        lazy = [local for (leaf, _), local in groups if isinstance(leaf, Lazy)]
        return {n for local in lazy for one in local for n in one.positions}

    def _sum_rows(self, gradients: dict[int, Any]) -> None:
        """Sums what lazy optimizers get of the same row: that is what is clipped, and finite."""
        for n in sorted(self._lazy() & gradients.keys()):
            with tf.device(self.jobs.device(self.jobs.jobs[n].owner)):
                gradients[n] = rows_summed(gradients[n])

    def _settle(self, source: GradientSource, live: set[int], compress: bool) -> None:
        """Takes out of buckets and exchanges what has no gradient, or turns out to be rows.

        After the first update state stays where graphs that were traced have it, so that what has
        no gradient for once is passed over in its bucket.
        """
        fused = {v for bucket in self.jobs.buckets for v in bucket.members}
        exchanged = {v for exchange in self.jobs.exchanges for v in exchange.members}
        apart = fused | exchanged if not self._has_updated else exchanged if compress else set()
        if wrong := (apart - live) | ((fused | exchanged) & source.rows):
            # Known only now: rows stay rows, and Keras passes over what has no gradient.
            if self.jobs.classes is not None:
                self.jobs.classes.refuse_rows(wrong & source.rows)
            with function_graphs.variables_apart():
                self._keep_apart(wrong)

    def _keep_apart(self, variables: set[int]) -> None:
        """Takes variables out of buckets."""
        self._unfused |= variables
        keys = [None if v in self._unfused else key for v, key in enumerate(self._keys)]
        self.jobs.build(keys, self._whole)
        for number, sums in self.sums.items():
            sums.show(self.groups[number][0])

    def _build_sums(self, dense: set[int]) -> None:
        """Makes what accumulates gradients where they are made, on first use."""
        if self.sums or not self._sum_locally:
            return
        devices = [one.devices for one in self.jobs.topology.slices]
        with tf.init_scope():
            for number, (leaf, members) in enumerate(self.groups):
                if leaf.gradient_accumulation_steps:
                    sums = LocalSums(self.jobs.entries, devices)
                    sums.build([v for v in members if v in dense])
                    sums.show(leaf)
                    self.sums[number] = sums

    def _accumulated(self, reduction: Reduction, scale: Any) -> dict[int, Any]:
        """Adds to the local sums; the gradients of their jobs: totals when due, else zeros."""
        gradients: dict[int, Any] = {}
        compress = reduction.compress
        # The dynamic scale is divided out as sums are made.
        factor = None if self.loss_scale is not None else self.scale()
        for number, sums in self.sums.items():
            variables = {v for v in sums.sums if v in reduction.connected}
            sums.add(reduction.given, sorted(variables - reduction.accumulated), scale)
            leaf, local = self.groups[number][0], self.jobs.local[number]
            held = held_by(local, self.jobs.updating(variables))

            def total(sums: LocalSums = sums, mine: set[int] = variables, held: Any = held) -> None:
                found = Reduction(self.jobs, sums, mine, mine, factor, compress=compress)
                found.advance(mine)
                found.keep()
                for n, gradient in found.gradients.items():
                    held[n].put(gradient)
                sums.reset(sorted(sums.sums))

            tf.cond(is_due(leaf, local), total, lambda: None)
            gradients.update({n: one.take() for n, one in held.items()})
        return gradients

    def _are_finite(self, gradients: Mapping[int, Any]) -> list[Any]:
        """Of each job's gradient, on its owner."""
        return [
            self._is_finite(self.jobs.jobs[n].owner, values_of(g)) for n, g in gradients.items()
        ]

    def _is_finite(self, at: Coordinate, gradient: Any) -> Any:
        with tf.device(self.jobs.device(at)):
            return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(gradient)))

    def _apply_unscaled(self, reduction: Reduction) -> None:
        assert self.loss_scale is not None
        scale = self.loss_scale.scale()
        unscaled = {}
        for n, gradient in reduction.gradients.items():
            if self.jobs.variable(self.jobs.jobs[n]) in self._overwritten:
                unscaled[n] = gradient
                continue
            with tf.device(self.jobs.device(self.jobs.jobs[n].owner)):
                unscaled[n] = ops.divide(gradient, scale)
        self._apply({**unscaled, **self._accumulated(reduction, scale)}, reduction.connected)
        self.loss_scale.grow()

    def _apply(self, gradients: dict[int, Any], connected: set[int]) -> None:
        self.jobs.take_over()
        held = self._held_rows(gradients)
        for backing in held:
            backing.hold()
        try:
            self._update_and_send(gradients, connected)
        finally:
            for backing in held:
                backing.release()
        self.jobs.hand_on(connected)

    def _held_rows(self, gradients: dict[int, Any]) -> list[RowsBacking]:
        """Backings of rows that are sent whole after their update, and need no write of it.

        A variable of which rows are written in place has a buffer of its own from then on, and a
        copy is made at each read. Kept rows take the place of their gradient meanwhile.

        Not those that Keras writes inside a branch, whose tensors are unknown outside.
        """
        found, changed = [], self._changed_rows(gradients)
        for (leaf, _), local in zip(self.groups, self.jobs.local):
            branches = leaf.gradient_accumulation_steps or leaf.ema_overwrite_frequency
            if branches:
                continue
            for n in (n for one in local for n in one.positions if n in gradients):
                job = self.jobs.jobs[n]
                if self.jobs.units[job.units[0]].span is not None and n not in changed:
                    found.append(backing_of(job.variable))
        return found

    def _update_and_send(self, gradients: dict[int, Any], connected: set[int]) -> None:
        devices = list({one.device for local in self.jobs.local for one in local})
        masks = {n: self.jobs.live(n, connected) for n in gradients}
        some = {n: mask for n, mask in masks.items() if mask is not None}
        waits = [waiting(leaf, local) for (leaf, _), local in zip(self.groups, self.jobs.local)]
        for (leaf, _), local in zip(self.groups, self.jobs.local):
            clip_globally(self.jobs, leaf, local, gradients, some)
            moves = any(n in gradients for one in local for n in one.positions)
            for one in local:
                live = [(n, v) for n, v in zip(one.positions, one.variables) if n in gradients]
                with tf.device(one.device), instantiated_cheaply(devices):
                    if moves:
                        parts = {i: some[n] for i, n in enumerate(one.positions) if n in some}
                        one.apply([gradients[n] for n, _ in live], [v for _, v in live], parts)
                    else:
                        one.iterations().assign_add(1)
        if self.inner not in [leaf for leaf, _ in self.groups]:
            keras_optimizers.iterations_variable(self.inner).assign_add(1)
        overwritten = any(leaf.use_ema for leaf, _ in self.groups)
        numbers = range(len(self.jobs.jobs)) if overwritten else gradients
        changed = self._changed_rows(gradients)
        send_what_changed(self.jobs, numbers, waits, self.one_by_one, changed)

    def _changed_rows(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """By job that updates some rows of a table alone, their numbers."""
        return {
            n: gradient.indices
            for n, gradient in gradients.items()
            if self.jobs.variable(self.jobs.jobs[n]) in self.row_updates and is_sparse(gradient)
        }

    def without_batch(self, connected: Sequence[int]) -> None:
        """What Keras updates in a step whose batch does not come, because the data has run out.

        Its graph counts the step and decays weights before it learns that; where these wait for
        the gradients (loss scaling; the count, with accumulation) it does not. A run goes on from
        there.

        Args:
            connected: Trainable variables with a gradient.
        """
        if self.loss_scale is not None:
            return
        self.jobs.take_over()
        live = set(self.jobs.updating(set(connected)))
        for number, sums in self.sums.items():
            due = is_due(self.groups[number][0], self.jobs.local[number])
            tf.cond(due, lambda sums=sums: sums.reset(sorted(sums.sums)), lambda: None)
        for local in self.jobs.local:
            for one in local:
                with tf.device(one.device):
                    one.without_gradients(
                        [v for n, v in zip(one.positions, one.variables) if n in live]
                    )
        if self.inner not in [leaf for leaf, _ in self.groups]:
            keras_optimizers.iterations_variable(self.inner).assign_add(1)
        if any(leaf.weight_decay is not None for leaf, _ in self.groups):
            send_values(self.jobs, live, self.one_by_one)
            self.jobs.hand_on(connected)
