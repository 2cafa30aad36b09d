"""What each device updates: its units and flat vectors, and the Keras optimizer that does it."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_optimizers
from kdist.config.compression import Classes
from kdist.config.state_format import StateFormatConfig
from kdist.optimizer.absent import live_elements
from kdist.optimizer.compressed import CompressedGradients, Compression, KnownStates
from kdist.optimizer.formatted_slots import format_slots
from kdist.optimizer.gradients import GradientSource
from kdist.optimizer.local import LocalOptimizer, shares_steps
from kdist.optimizer.logical_slots import Span, link_slots
from kdist.optimizer.shared_steps import SharedSteps
from kdist.plan.bucket import Bucket, make_buckets
from kdist.plan.exchange import Exchange, make_exchanges
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import (
    Coordinate,
    Index,
    Placement,
    covers,
    relative,
    shape_of,
)
from kdist.storage.flat_rows import flat_view, unflat
from kdist.storage.parts import assemble
from kdist.storage.row_views import rows_view
from kdist.storage.variables import Stored, make_local

import keras
import numpy as np
import tensorflow as tf


def _drop_master(entry: weakref.ref[Stored], master: weakref.ref[keras.Variable]) -> None:
    """Lets go of a whole copy whose optimizer is no more."""
    if (found := entry()) is not None:
        found.masters = [one for one in found.masters if one[1] is not master()]


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


class Jobs:
    """The jobs of one optimizer over the mesh.

    Args:
        entries: `Stored` of each trainable variable, in the model's order.
        topology: The mesh.
        units: Who updates which part.
        groups: The optimizers that do math, with the positions of their variables.
        state_format: Formats of the optimizers' moments.
        classes: How the gradient of each variable travels; None for all as they are.
        low_rank: What low-rank compression keeps; see `Compression`.
        model: Whose they are: what models that share weights have is told apart by it.

    Attributes:
        buckets: What travels together.
        exchanges: What travels compressed.
        jobs: What is updated as one variable.
        local: Per group, its local optimizers.
        of: Number of the job that has a unit.
    """

    def __init__(
        self,
        entries: Sequence[Stored],
        topology: Topology,
        units: Sequence[UpdateUnit],
        groups: Sequence[tuple[Any, list[int]]],
        state_format: StateFormatConfig,
        classes: Classes | None,
        low_rank: KnownStates,
        model: Any = None,
    ) -> None:
        self.entries = list(entries)
        self.model = model
        self.topology = topology
        self.units = tuple(units)
        self.groups = list(groups)
        self.state_format = state_format
        self.classes = classes
        self.low_rank = low_rank
        self._masters: list[tuple[Stored, tuple[str, keras.Variable]]] = []

    def build(self, keys: Sequence[Hashable | None], whole: Sequence[bool]) -> None:
        """Makes the local optimizers, and moves the state of those there were into them.

        Args:
            keys: See `make_buckets`.
            whole: See `make_buckets`.
        """
        self._drop_masters()
        placements = [entry.placement for entry in self.entries]
        self.buckets = make_buckets(self.units, placements, keys, whole)
        self._compression = self._compress(placements, keys)
        self.jobs = self._make_jobs()
        self.of = {n: j for j, job in enumerate(self.jobs) for n in job.units}
        self.local = [self._build_local(leaf, members) for leaf, members in self.groups]

    def _drop_masters(self) -> None:
        for entry, master in self._masters:
            entry.masters = [one for one in entry.masters if one is not master]
        self._masters.clear()

    def let_go(self) -> None:
        """Another optimizer updates the variables from now on, in new programs."""
        self._drop_masters()
        for entry in self.entries:
            entry.updaters = [one for one in entry.updaters if one() not in (None, self)]

    def take(self, variables: Container[int]) -> None:
        """Notes whose variables these are, of which an update is begun.

        Raises:
            ValueError: Two optimizers of a model update one, and one of them has a whole copy of
                it, which the other's updates do not reach.
        """
        for entry in (one for v, one in enumerate(self.entries) if v in variables):
            others = [one for one in self._others(entry) if one.model is self.model]
            if others and any(one._has_master(entry) for one in (self, *others)):
                names = sorted({group[0].name for one in (self, *others) for group in one.groups})
                raise ValueError(
                    "Two optimizers update one weight, and one of them keeps a whole copy of it: "
                    "with state_on='host', and where its update sees whole tensors (Lamb, Muon, "
                    "Adafactor, clipnorm, a constraint) of a weight that is cut. Let one optimizer "
                    "update each weight, or use state_on='device' and optimizers that look at "
                    "single elements (SGD, Adam). "
                    f"Received: {entry.variable.path!r}, updated by {names}"
                )
            if not any(one() is self for one in entry.updaters):
                entry.updaters.append(weakref.ref(self))

    def _others(self, entry: Stored) -> list[Jobs]:
        """What else has updated a variable, and is there still."""
        found = [one() for one in entry.updaters]
        return [one for one in found if one is not None and one is not self]

    def take_over(self) -> None:
        """Gives own whole copies the values that other models' optimizers may have made since."""
        for entry, (device, master) in self._masters:
            if self._others(entry):
                with tf.device(device):
                    master.assign(tf.convert_to_tensor(entry.whole()))

    def hand_on(self, variables: Container[int]) -> None:
        """Gives the whole copies of other models' optimizers the values of an update.

        Of those that come later none is known here: they take them over.
        """
        mine = {id(master) for _, (_, master) in self._masters}
        for entry in (one for v, one in enumerate(self.entries) if v in variables):
            for device, master in entry.masters:
                if id(master) not in mine:
                    with tf.device(device):
                        master.assign(tf.convert_to_tensor(entry.whole()))

    def _has_master(self, entry: Stored) -> bool:
        return any(one is entry for one, _ in self._masters)

    def _compress(
        self, placements: Sequence[Placement], keys: Sequence[Hashable | None]
    ) -> Compression | None:
        if self.classes is None:
            return None
        apart = {v for v, key in enumerate(keys) if key is None}
        compressors = self.classes.compressors(without=apart)
        exchanges = make_exchanges(self.units, placements, compressors, keys, self.buckets)
        if not exchanges:
            self.low_rank.clear()
            return None
        variables = [entry.variable for entry in self.entries]
        return Compression(exchanges, placements, self.topology, self.low_rank, variables)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """What travels compressed."""
        return () if self._compression is None else self._compression.exchanges

    @property
    def kept(self) -> list[tf.Variable]:
        """What low-rank compression keeps between steps."""
        return [] if self._compression is None else self._compression.variables

    def compressed(self, source: GradientSource, scale: Any) -> CompressedGradients | None:
        """A source whose gradients travel compressed; None if none do. See `Compression.over`."""
        return None if self._compression is None else self._compression.over(source, scale)

    def is_first(self, number: int) -> bool:
        """Whether a job is the first slice's, where every slice updates its own copy."""
        unit = self.units[self.jobs[number].units[0]]
        slices = self.entries[unit.variable].placement.slices
        return unit.owner[0] == slices[0] or not unit.replicated

    def nbytes(self, unit: int) -> int:
        """Bytes of what a unit updates."""
        return self.units[unit].nbytes(self.entries[self.units[unit].variable].placement)

    def variable(self, job: Job) -> int:
        """Position of the (first) parameter that a job updates."""
        return self.units[job.units[0]].variable

    def updating(self, variables: Container[int]) -> list[int]:
        """Numbers of the jobs that update some parameters."""
        units = self.units
        return [
            n
            for n, job in enumerate(self.jobs)
            if any(units[unit].variable in variables for unit in job.units)
        ]

    def live(self, number: int, connected: Container[int]) -> np.ndarray | None:
        """Which elements of a job's variable have a gradient; None if all have.

        Args:
            number: Of the job.
            connected: Positions of the parameters that have one.
        """
        units = [self.units[n] for n in self.jobs[number].units]
        placements = [self.entries[unit.variable].placement for unit in units]
        sizes = [math.prod(shape_of(unit.index(p))) for unit, p in zip(units, placements)]
        return live_elements(sizes, [unit.variable in connected for unit in units])

    def device(self, at: Coordinate) -> str:
        """TensorFlow device string of a coordinate."""
        return self.topology.device(at)

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
        return jobs

    def _flat_variable(self, bucket: Bucket, p: int) -> keras.Variable:
        at = bucket.owners[p]
        parts = []
        for v, n in zip(bucket.members, bucket.units[p]):
            unit = self.units[n]
            index = None if unit.span is None else self.own_part(unit)
            parts.append((self.entries[v].locals[at], index))
        with tf.device(self.device(at)):
            return flat_view(self.entries[bucket.members[0]].variable, parts)

    def _unit_variable(self, unit: UpdateUnit) -> keras.Variable:
        """The local variable that the optimizer updates for a unit.

        The owner's own shard, or a part of it, or, for an update that needs the whole of a cut
        tensor, a whole copy kept on the owner.
        """
        entry = self.entries[unit.variable]
        if unit.shard is not None:
            local = entry.locals[unit.owner]
            if unit.span is not None:
                with tf.device(entry.device(unit.owner)):
                    local = rows_view(entry.variable, local, self.own_part(unit))
        else:
            device = entry.device(unit.owner)
            with tf.device(device):
                local = make_local(entry.variable, tf.identity(entry.whole()))
            entry.masters.append((device, local))
            self._masters.append((entry, entry.masters[-1]))
            weakref.finalize(self, _drop_master, weakref.ref(entry), weakref.ref(local))
        if entry.variable.constraint is not None:
            local.constraint = entry.variable.constraint
        return local

    def _build_local(self, leaf: Any, members: list[int]) -> list[LocalOptimizer]:
        by_owner: dict[Coordinate, list[int]] = {}
        for n, job in enumerate(self.jobs):
            if self.units[job.units[0]].variable in members and not self._is_empty(job):
                by_owner.setdefault(job.owner, []).append(n)
        steps = SharedSteps(shares_steps(leaf))
        local = [
            LocalOptimizer(
                leaf,
                self.device(at),
                numbers,
                [self.jobs[n].variable for n in numbers],
                [self._logical(self.jobs[n]) for n in numbers],
                steps,
            )
            for at, numbers in sorted(by_owner.items())
        ]
        for one in local:
            format_slots(one, self.state_format, [self._draw(n) for n in one.positions])
        variables = [self.entries[v].variable for v in members]
        where = dict(zip(members, keras_optimizers.positions(leaf, variables), strict=True))
        link_slots(leaf, local, [self._spans(job, where) for job in self.jobs])
        return local

    def _is_empty(self, job: Job) -> bool:
        """Whether it is the part without rows of a table; Keras takes its width for a bias's."""
        return 0 in job.variable.shape and 0 not in self._logical(job).shape

    def _draw(self, number: int) -> int:
        """What a job's stochastic rounding draws by: the same for all copies of an update."""
        unit = self.units[self.jobs[number].units[0]]
        if not unit.replicated:
            return number
        slices = self.entries[unit.variable].placement.slices
        first = dataclasses.replace(unit, owner=(slices[0], unit.owner[1]))
        return next(n for n, job in enumerate(self.jobs) if self.units[job.units[0]] == first)

    def _logical(self, job: Job) -> keras.Variable:
        return self.entries[self.units[job.units[0]].variable].variable

    def _spans(self, job: Job, where: dict[int, int]) -> list[Span]:
        """Which parts of which variables a job's state stands for."""
        spans, start = [], 0
        for n in job.units:
            unit = self.units[n]
            position = where.get(unit.variable, -1)
            index = unit.index(self.entries[unit.variable].placement)
            shape = shape_of(index)
            spans.append(Span(position, self._index(unit), start if job.flat else None, shape))
            start += math.prod(shape)
        return spans

    def _index(self, unit: UpdateUnit) -> Any:
        placement = self.entries[unit.variable].placement
        index = unit.index(placement)
        return None if covers(index, placement.shape) else index

    def whole(self, gradients: Mapping[int, Any], connected: Container[int]) -> dict[int, Any]:
        """Each parameter's gradient, put together from those of its jobs on the device in scope.

        Args:
            gradients: By job, what its variable is updated with.
            connected: Positions of the parameters that have a gradient.
        """
        parts: dict[int, list[tuple[Index, Any]]] = {}
        for number, gradient in gradients.items():
            job = self.jobs[number]
            if not self.is_first(number):
                continue
            placed = [self.entries[self.units[n].variable].placement for n in job.units]
            indices = [self.units[n].index(p) for n, p in zip(job.units, placed)]
            with tf.device(self.device(job.owner)):
                pieces = (
                    unflat(gradient, [shape_of(i) for i in indices]) if job.flat else [gradient]
                )
            for n, index, piece in zip(job.units, indices, pieces):
                parts.setdefault(self.units[n].variable, []).append((index, piece))
        return {v: assemble(found) for v, found in parts.items() if v in connected}

    def own_part(self, unit: UpdateUnit) -> Index:
        """The unit's part, counted inside its shard; of the dims up to that which is shared."""
        assert unit.shard is not None
        placement, dims = self.entries[unit.variable].placement, unit.dim + 1
        return relative(unit.index(placement)[:dims], placement.shards[unit.shard].index[:dims])
