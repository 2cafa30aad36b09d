"""The plan: what a step will do, known before it runs and without touching a device.

Bytes and counts here follow from layouts and the mesh alone; tests hold the executed graph and the
buffers that exist to them.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence

from kdist.config.compression import Classes
from kdist.pipeline.instructions import Gather
from kdist.pipeline.work import Work
from kdist.plan import layouts_png
from kdist.plan.between_processes import Crossing, between_processes
from kdist.plan.between_replicas import between_replicas
from kdist.plan.boundaries import BoundaryTensor, BoundaryTraffic, boundary_traffic
from kdist.plan.bucket import Bucket
from kdist.plan.device_memory import DeviceMemory
from kdist.plan.exchange import Exchange
from kdist.plan.inside_layers import InsideTraffic
from kdist.plan.partition import Decision
from kdist.plan.plan_summary import print_plan
from kdist.plan.split_traffic import SplitTraffic, split_traffic
from kdist.plan.table_traffic import HostTraffic, TableTraffic, host_traffic, table_traffic
from kdist.plan.traffic import Traffic
from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Placement
from kdist.storage.sparse import LookUp

from rich.console import Console


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """What one device keeps and does.

    Attributes:
        device: TensorFlow device string.
        parameter_bytes: Weights stored there, and whole copies that an update of them needs.
        updated_bytes: Of these, the bytes whose optimizer state and update are there.
        updates: Number of update units.
        memory: What is there, and what a step has there; None before the first step.
    """

    device: str
    parameter_bytes: int
    updated_bytes: int
    updates: int
    memory: DeviceMemory | None = None

    @property
    def state_bytes(self) -> int | None:
        """Optimizer state that is there, sums of accumulated gradients included, if any exists."""
        return None if self.memory is None else self.memory.slots


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training step will do on a mesh.

    Attributes:
        topology: The mesh.
        weights: Placement of every weight of the model.
        units: Who updates which part of which trainable weight.
        trainable: Position in `weights` of each trainable weight, in the model's order.
        frozen: The same of weights that do not train, and are stored cut over the data axis.
        buckets: Which units travel as one vector per owner.
        notes: What the user should know: fallbacks, demoted axes.
        decisions: What optimizer parallelism does with each trainable weight.
        exchanges: Which gradients travel compressed.
        classes: How each gradient travels; None for all as they are.
        gathers: Those of a step, of `params` that are not stored whole.
        look_ups: By trainable variable whose gradient is rows of a table, how they are looked up.
        frozen_look_ups: The same by weight, of tables that are fetched and do not train.
        micro_batches: That each replica's part of a batch is cut into.
        row_updates: Trainable variables of which an update from rows changes these rows alone.
        summed_rows: Trainable variables of which gradients of one row may be summed.
        ahead: Trainable variables of which rows are looked up a step ahead in `fit`.
        boundaries: Tensors that cross from each virtual stage of a pipeline to the next.
        inside: What layers communicate over inner axes; None while no program is lowered.
        memory: What is on each device once a step has run; its gradients, gathered parameters and
            activations once `kdist.inspect` has read them from a step.
        works: What stages, or a model in chunks, do instruction by instruction, per pass.

    Example:
        >>> plan = model.plan()
        >>> plan.summary()  # as tables
        >>> sum(one.nbytes for one in plan.traffic())  # bytes between the replicas of a step
        13856
        >>> [one.updates for one in plan.devices()]  # parts of weights that each device updates
        [1, 5]
    """

    topology: Topology
    weights: tuple[Placement, ...]
    units: tuple[UpdateUnit, ...]
    trainable: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    notes: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    classes: Classes | None = None
    gathers: tuple[Gather, ...] = ()
    look_ups: tuple[tuple[int, LookUp], ...] = ()
    frozen_look_ups: tuple[tuple[int, LookUp], ...] = ()
    micro_batches: int = 1
    row_updates: frozenset[int] = frozenset()
    summed_rows: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()
    boundaries: tuple[tuple[BoundaryTensor, ...], ...] = ()
    inside: tuple[InsideTraffic, ...] | None = dataclasses.field(default=(), compare=False)
    memory: tuple[DeviceMemory, ...] = dataclasses.field(default=(), compare=False)
    works: tuple[Work, ...] = dataclasses.field(default=(), compare=False)

    @property
    def work(self) -> Work:
        """What is done in the last pass, that of the gradients."""
        return self.works[-1]

    @property
    def params(self) -> tuple[int, ...]:
        """Positions in `weights` of what steps take as parameters: trainable, then frozen ones."""
        return self.trainable + self.frozen

    @property
    def changed_by_rows(self) -> frozenset[int]:
        """Trainable tables of which changed rows are sent, not the whole."""
        sent_whole = {unit.variable for unit in self.units if unit.shard is None}
        return (self.row_updates & {v for v, _ in self.look_ups}) - sent_whole

    @property
    def compressed(self) -> set[int]:
        """Positions of the trainable weights whose gradients travel compressed."""
        return {v for exchange in self.exchanges for v in exchange.members}

    @property
    def uses_host(self) -> bool:
        """Whether something is stored, or updated, on the host."""
        return any(unit.owner == HOST for unit in self.units)

    def unit_bytes(self, unit: UpdateUnit) -> int:
        """Bytes that a unit updates."""
        return unit.nbytes(self.weights[self.trainable[unit.variable]])

    def devices(self) -> list[DevicePlan]:
        """Per device of the mesh, in order; then the host, if there is something on it."""
        slices = enumerate(self.topology.slices)
        places = [(s, k) for s, one in slices for k in range(len(one.devices))]
        places += [HOST] * self.uses_host
        plans, memory = [], {one.device: one for one in self.memory}
        for at in places:
            mine = [u for u in self.units if u.owner == at]
            copies = [self.unit_bytes(u) for u in mine if u.shard is None]  # of what is cut
            stored = sum(w.stored_bytes(at) for w in self.weights) + sum(copies)
            updated = sum(self.unit_bytes(u) for u in mine)
            device = self.topology.device(at)
            plans.append(DevicePlan(device, stored, updated, len(mine), memory.get(device)))
        return plans

    def traffic(self) -> list[Traffic]:
        """Communication outside of layers per step, each kind summed over all devices of the mesh.

        A gradient part goes from every slice to its owner, and the new value from there to every
        other holder; together what a ring all-reduce would move. Parts in a bucket travel as one
        message. An update that needs the whole of a tensor gets its parts over the inner axes too.
        Weights stored sliced over data are gathered before use instead, and nothing is broadcast.
        For gradients that travel compressed see `kdist.plan.exchange`. Rows of embedding
        tables, of gradients or changed by an update, are not among these: see `tables`.
        With gradient accumulation it is that of a step that updates.
        """
        return between_replicas(self)

    def between_stages(self) -> list[BoundaryTraffic]:
        """What stages of a pipeline send to each other per step, by rows of the batch."""
        topology = self.topology
        return boundary_traffic(
            self.boundaries,
            topology.num_stages,
            topology.data_size,
            self.micro_batches,
            topology.inner_size,
        )

    def between_processes(self) -> Crossing | None:
        """What goes from one process to another per step; None where there is one process."""
        return between_processes(self)

    def tables(self) -> list[TableTraffic]:
        """What is sent of embedding tables per step, by rows that are looked up or change."""
        found = []
        for variable, look_up in self.look_ups:
            if self.weights[self.trainable[variable]].on_host:
                continue
            units = [unit for unit in self.units if unit.variable == variable]
            placement = self.weights[self.trainable[variable]]
            by_rows = variable in self.row_updates
            pieces = self._pieces(variable, look_up)
            found.append(table_traffic(placement, units, look_up, pieces, by_rows))
        return [table for table in found if table.messages]

    def _pieces(self, variable: int, look_up: LookUp) -> int:
        """In how many pieces the rows of a replica's gradient travel.

        TensorFlow joins those of several replicas and those of micro-batches at once.
        """
        placement = self.weights[self.trainable[variable]]
        if not placement.fetched:
            return self.micro_batches
        if variable in self.summed_rows:
            return 1
        return self.micro_batches * look_up.users // max(1, len(placement.groups))

    def host_tables(self) -> list[HostTraffic]:
        """What goes between the host and the devices per step, by tables on the host."""
        placed = [(v, self.weights[self.trainable[v]], look_up) for v, look_up in self.look_ups]
        found = [
            host_traffic(
                p, look_up, v in self.summed_rows, self._pieces(v, look_up), v in self.ahead
            )
            for v, p, look_up in placed
            if p.on_host
        ]
        frozen = [(self.weights[w], one) for w, one in self.frozen_look_ups]
        return found + [host_traffic(p, one, trains=False) for p, one in frozen if p.on_host]

    def split_tables(self) -> list[SplitTraffic]:
        """What look-ups in tables that are split by hand send per step."""
        by_weight = [(self.trainable[v], one) for v, one in self.look_ups]
        placed = [(self.weights[w], one) for w, one in (*by_weight, *self.frozen_look_ups)]
        return [split_traffic(p, look_up) for p, look_up in placed if p.split is not None]

    def summary(self, console: Console | None = None) -> None:
        """Prints the plan as tables, as wide as the terminal at most.

        Args:
            console: Where to print; standard output by default.
        """
        print_plan(self, console or Console())

    def save_layouts(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draws which part of each weight every device stores, and which it updates, as PNG.

        A row per weight, a column per device. Weights whose paths differ in numbers alone and that
        lie alike, such as those of equal blocks, share a row.

        Args:
            path: File to write.
            title: Of the picture; the mesh by default.

        Raises:
            ImportError: Without matplotlib (the extra `plot`).

        Example:
            >>> model.plan().save_layouts("layouts.png")
        """
        layouts_png.save_png(self, path, title)

    def __str__(self) -> str:
        text = io.StringIO()
        self.summary(Console(file=text, width=Console().width))
        return text.getvalue().rstrip()


def make_plan(
    topology: Topology,
    weights: Sequence[Placement],
    trainable: Sequence[int],
    units: Sequence[UpdateUnit],
    *,
    frozen: Sequence[int] = (),
    buckets: Sequence[Bucket] = (),
    notes: Sequence[str] = (),
    decisions: Sequence[Decision] = (),
    exchanges: Sequence[Exchange] = (),
    classes: Classes | None = None,
    gathers: Sequence[Gather] | None = None,
    look_ups: Mapping[int, LookUp] | None = None,
    micro_batches: int = 1,
    row_updates: frozenset[int] = frozenset(),
    works: Sequence[Work] = (),
    summed_rows: frozenset[int] = frozenset(),
    ahead: frozenset[int] = frozenset(),
    boundaries: Sequence[Sequence[BoundaryTensor]] = (),
    inside: Sequence[InsideTraffic] | None = (),
    memory: Sequence[DeviceMemory] = (),
) -> Plan:
    """Puts a plan together; without `gathers`, what is not stored whole is gathered once."""
    if gathers is None:
        params = enumerate([*trainable, *frozen])
        gathers = [Gather(0, (v,)) for v, i in params if weights[i].gathered]
    return Plan(
        topology=topology,
        weights=tuple(weights),
        units=tuple(units),
        trainable=tuple(trainable),
        frozen=tuple(frozen),
        buckets=tuple(buckets),
        notes=tuple(notes),
        decisions=tuple(decisions),
        exchanges=tuple(exchanges),
        classes=classes,
        gathers=tuple(gathers),
        look_ups=tuple(sorted((look_ups or {}).items())),
        micro_batches=micro_batches,
        row_updates=row_updates,
        works=tuple(works),
        summed_rows=summed_rows,
        ahead=ahead,
        boundaries=tuple(map(tuple, boundaries)),
        inside=None if inside is None else tuple(inside),
        memory=tuple(memory),
    )
