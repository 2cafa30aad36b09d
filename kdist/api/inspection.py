"""`kdist.inspect`: what was lowered and what exists, read from graphs and buffers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from kdist.api.attached import attached
from kdist.api.changed_weights import follow_to_plan
from kdist.api.inside_layers import collectives_of, over_inner_axes, refuse_batch_size
from kdist.api.parallelize import Parallel
from kdist.display.progress import shown
from kdist.display.tables import readable
from kdist.dtensor.lowered import Collective, format_table
from kdist.dtensor.lowered_program import Island
from kdist.plan.device_memory import DeviceMemory
from kdist.plan.inside_layers import counted_per
from kdist.plan.plan import Plan
from kdist.report import memory as device_memory
from kdist.rows.model_study import ModelStudy

import keras

LISTED = 6
"""Weights that are gathered before use and listed line by line; at level 3 all may be."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `kdist.inspect` found; prints as tables.

    Attributes:
        collectives: Those inside layers, of one slice, from the lowered training program (or, of
            a model that has not trained, from a forward and backward pass without a loss). In a
            pipeline those of all stages of a replica, for one micro-batch.
        memory: Per device, in bytes.
        plan: What kdist itself communicates.
        fallbacks: Why the model, or part of it, does not run over DTensor.
        gathered: Weights that are stored cut and gathered before use.
        not_analysed: Why gradients and gathered parameters are not counted, "" if they are.
        rows: Where rows of the batch meet while each replica computes its own.
        islands: Operations that DTensor cannot expand, and which every device of a slice therefore
            runs whole: what is gathered for them, and the share of the step's floating point
            operations (those of matrix products, estimated from shapes) that is not divided.
        closed: Why activations are not counted, "" if they are, or nothing of the step is.

    Example:
        >>> found = kdist.inspect(model)
        >>> found.count("all-gather")  # collectives inside layers: none without inner axes
        0
        >>> [one.parameters for one in found.memory]  # bytes of weights on each device
        [6928, 6928]
    """

    collectives: tuple[Collective, ...]
    memory: tuple[DeviceMemory, ...]
    plan: Plan
    fallbacks: tuple[str, ...]
    gathered: tuple[str, ...]
    not_analysed: str = ""
    rows: ModelStudy = ModelStudy()
    islands: tuple[Island, ...] = ()
    closed: str = ""

    def count(self, kind: str, layer: str | None = None, phase: str | None = None) -> int:
        """Number of collectives of a kind, optionally of one layer or phase."""
        return sum(
            c.kind == kind
            and (layer is None or c.layer == layer)
            and (phase is None or c.phase == phase)
            for c in self.collectives
        )

    def __str__(self) -> str:
        parts = [f"collectives inside layers, {counted_per(self.plan.micro_batches)}"]
        parts.append(format_table(self.collectives) if self.collectives else "  none")
        rows = self.memory[0].rows
        step = "a step" if rows is None else f"a step of {rows} rows (batch_size={rows})"
        parts.append(f"memory per device: variables, and the most that {step} may have at once")
        parts.append(device_memory.table(self.memory))
        if self.not_analysed:
            parts.append(f"gradients and gathered parameters not counted: {self.not_analysed}")
        if self.closed:
            parts.append(f"activations not counted: {self.closed}")
        parts.append("outside of layers, per step")
        for t in self.plan.traffic():
            parts.append(f"  {t.what} over {t.axis}: {t.messages} messages, {readable(t.nbytes)}")
        for table in self.plan.tables():
            parts.append(f"  rows of {table.path}: {table.messages} messages, {table}")
        for one in self.plan.host_tables():
            parts.append(f"  rows of {one.path} on the host: {one.messages} messages, {one}")
        for two in self.plan.split_tables():
            parts.append(
                f"  look-ups in {two.path}, parts of {two.sizes}: {two.messages} messages, {two}"
                + f" ({two.compared()})" * bool(two.others)
            )
        parts.extend(self._gathered_lines())
        parts.extend(f"on gathered operands: {island}" for island in self.islands)
        parts.extend(f"not over DTensor: {reason}" for reason in self.fallbacks)
        parts.extend(f"note: {note}" for note in self.plan.notes if note not in self.fallbacks)
        parts.extend(self.rows.lines())
        return "\n".join(parts)

    def _gathered_lines(self) -> list[str]:
        if len(self.gathered) <= LISTED:
            return [f"gathered before use: {path}" for path in self.gathered]
        first, last = self.gathered[0], self.gathered[-1]
        return [
            f"gathered before use: {len(self.gathered)} weights, from {first} to {last} "
            "(`gathered` has all)"
        ]

    def save_memory(self, path: str | pathlib.Path, title: str = "") -> None:
        """Draws the memory per device, by what it is for, as PNG.

        Args:
            path: File to write.
            title: Of the picture.

        Raises:
            ImportError: Without matplotlib (the extra `plot`).
        """
        device_memory.save_png(self.memory, path, title)


@shown("inspecting a step")
def inspect(model: keras.Model, batch_size: int | None = None) -> Inspection:
    """Shows which collectives each layer causes, and what each device holds.

    Read from what DTensor lowered, from the buffers that exist and from executed graphs, not from
    what was declared. Of a model that has trained, the step is traced and run once more, on zeros,
    for its executed graph; all variables get their values back. Not with `run_eagerly` and
    `jit_compile=True`, whose steps are not read.

    Args:
        model: A parallelized, compiled model.
        batch_size: Rows of the batch to run the step with, and whose collectives to show; by
            default those of the batches that it trained with (the number of its devices where a
            dataset's differ, or it has not trained), and the collectives of the first of them.

    Returns:
        An `Inspection`; print it.

    Raises:
        ValueError: The model is not parallelized; `batch_size` is no integer; or, over inner axes,
            it has not trained and has inputs with dims of unknown size.

    Example:
        >>> print(kdist.inspect(model))
    """
    refuse_batch_size(batch_size)
    parallel = attached(model)
    follow_to_plan(parallel)
    rows = batch_size or parallel.batch_rows or len(parallel.topology.devices)
    live = device_memory.analyse(parallel, rows)
    memory = device_memory.measure(parallel, None if isinstance(live, str) else live, rows)
    parallel.memory = () if isinstance(live, str) else memory
    collectives: Sequence[Collective] = ()
    islands: Sequence[Island] = ()
    if over_inner_axes(parallel):
        collectives = collectives_of(parallel, batch_size)
        islands = parallel.mesh_runner().islands()
    reason = live if isinstance(live, str) else ""
    return Inspection(
        tuple(collectives),
        memory,
        parallel.plan(),
        tuple(parallel.fallbacks),
        tuple(_gathered(parallel)),
        reason,
        parallel.study_rows(training=True),
        tuple(islands),
        "" if isinstance(live, str) else device_memory.closed(live),
    )


def _gathered(parallel: Parallel) -> list[str]:
    paths = [
        e.placement.path for e in parallel.entries.values() if e.placement.data_dim is not None
    ]
    if over_inner_axes(parallel):
        paths += parallel.mesh_runner().gathered_paths()
    return paths
