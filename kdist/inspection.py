"""`kdist.inspect`: what was lowered and what exists, read from graphs and buffers."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from kdist.device import Device
from kdist.lowered import Collective, format_table
from kdist.optimizer.formatted_slots import coded
from kdist.parallel import Parallel, attached
from kdist.plan import Plan, readable

import keras
import rich.box
import rich.console
import rich.table
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the variables that exist on one device.

    Attributes:
        device: TensorFlow device string.
        parameters: Weights, trainable or not, masters of whole-tensor optimizers included.
        slots: Optimizer state.
        compression: What low-rank compression keeps from step to step.
    """

    device: str
    parameters: int
    slots: int
    compression: int = 0


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `kdist.inspect` found; prints as tables.

    Attributes:
        collectives: Those inside layers, of one slice, from the lowered training program (or, of
            a model that has not trained, from a forward and backward pass without a loss).
        programs: How many programs were lowered.
        memory: Per device.
        plan: What kdist itself communicates.
        fallbacks: Why the model, or part of it, does not run over DTensor.
        gathered: Weights that are stored cut and gathered before use.
    """

    collectives: tuple[Collective, ...]
    memory: tuple[DeviceMemory, ...]
    plan: Plan
    fallbacks: tuple[str, ...]
    gathered: tuple[str, ...]

    def count(self, kind: str, layer: str | None = None, phase: str | None = None) -> int:
        """Number of collectives of a kind, optionally of one layer or phase."""
        return sum(
            c.kind == kind
            and (layer is None or c.layer == layer)
            and (phase is None or c.phase == phase)
            for c in self.collectives
        )

    def __str__(self) -> str:
        parts = ["collectives inside layers, per slice and step"]
        parts.append(format_table(self.collectives) if self.collectives else "  none")
        parts.append("memory of variables per device")
        parts.append(_memory_table(self.memory))
        parts.append("between replicas, per step")
        for t in self.plan.traffic():
            parts.append(f"  {t.what} over {t.axis}: {t.messages} messages, {readable(t.nbytes)}")
        parts.extend(f"gathered before use: {path}" for path in self.gathered)
        parts.extend(f"not over DTensor: {reason}" for reason in self.fallbacks)
        return "\n".join(parts)


def inspect(model: keras.Model, batch_size: int | None = None) -> Inspection:
    """Shows which collectives each layer causes, and what each device holds.

    Read from what DTensor lowered and from the buffers that exist, not from what was declared.

    Args:
        model: A parallelized, compiled model.
        batch_size: Rows of the batch to lower with if the model has not trained yet; by default
            the number of its devices.

    Returns:
        An `Inspection`; print it.

    Raises:
        ValueError: The model is not parallelized; or it has not trained, and its inputs have dims
            of unknown size.

    Example:
        >>> print(kdist.inspect(model))
    """
    parallel = attached(model)
    collectives: Sequence[Collective] = ()
    if parallel.topology.inner_size > 1 and not parallel.fallbacks:
        runner = parallel.spmd_runner()
        if not runner.recorded():
            runner.lower_without_loss(_zeros(model, batch_size or len(parallel.topology.devices)))
        collectives = runner.recorded()
    return Inspection(
        tuple(collectives),
        tuple(_memory(parallel)),
        parallel.plan(),
        tuple(parallel.fallbacks),
        tuple(_gathered(parallel)),
    )


def _zeros(model: keras.Model, rows: int) -> Any:
    inputs = None
    if isinstance(model, keras.Sequential) and model.inputs:
        inputs = model.inputs[0]
    elif isinstance(model, keras.Model) and model.built:
        inputs = getattr(model, "input", None)
    shapes = [tuple(t.shape[1:]) for t in keras.tree.flatten(inputs)] if inputs is not None else []
    if not shapes or any(None in s for s in shapes):
        raise ValueError(
            "The shapes of the model's inputs are not known. Train or evaluate one batch first. "
            f"Received: model={model.name!r}"
        )
    return keras.tree.map_structure(
        lambda t: tf.zeros((rows, *t.shape[1:]), keras.backend.standardize_dtype(t.dtype)), inputs
    )


def _memory(parallel: Parallel) -> list[DeviceMemory]:
    parameters = dict.fromkeys(parallel.topology.devices, 0)
    slots = dict.fromkeys(parallel.topology.devices, 0)
    for entry in parallel.entries.values():
        for at, local in entry.locals.items():
            parameters[entry.device(at)] += nbytes(local)
        for device, master in entry.masters:
            parameters[device] += nbytes(master)
    if parallel.update is not None:
        for group in parallel.update.jobs.local:
            for one in group:
                slots[one.device] += sum(nbytes(v) for v in one.optimizer.variables)
    kept = dict.fromkeys(parallel.topology.devices, 0)
    if parallel.update is not None:
        for variable in parallel.update.jobs.kept:
            device = Device.parse(variable.device).name
            kept[device] += variable.dtype.size * variable.shape.num_elements()
    return [DeviceMemory(d, parameters[d], slots[d], kept[d]) for d in parallel.topology.devices]


def nbytes(variable: keras.Variable) -> int:
    """Bytes of a variable's buffer."""
    if (codes := coded(variable)) is not None:
        return codes.nbytes
    size = 1
    for n in variable.shape:
        size *= int(n)
    return size * tf.as_dtype(variable.dtype).size


def _gathered(parallel: Parallel) -> list[str]:
    paths = [
        e.placement.path for e in parallel.entries.values() if e.placement.data_dim is not None
    ]
    if parallel.topology.inner_size > 1 and not parallel.fallbacks:
        paths += parallel.spmd_runner().gathered_paths()
    return paths


def _memory_table(memory: Sequence[DeviceMemory]) -> str:
    table = rich.table.Table(box=rich.box.SIMPLE)
    table.add_column("device", no_wrap=True)
    for title in ("weights", "optimizer state", "compression"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in memory:
        sizes = (one.parameters, one.slots, one.compression)
        table.add_row(one.device, *map(readable, sizes))
    text = io.StringIO()
    rich.console.Console(file=text, width=120).print(table)
    return text.getvalue().rstrip()
