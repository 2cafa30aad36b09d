"""How much memory each device of a mesh takes, by what it is for.

Parameters and optimizer state are counted from the variables that exist. Gradients and gathered
parameters live within a step: they are bounded by what the executed graph may have alive at once
(see `kdist.graphs.live_tensors`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.display.figure import new_figure
from kdist.display.tables import Column, as_text, number, readable
from kdist.graphs.live_tensors import LiveTensors
from kdist.plan.device_memory import DeviceMemory
from kdist.report.step_graph import live_tensors
from kdist.runtime.metrics import overrides
from kdist.sharding.device import Device
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf


def measure(
    parallel: Any, live: LiveTensors | None, rows: int | None = None
) -> tuple[DeviceMemory, ...]:
    """Memory per device of the mesh.

    Args:
        parallel: What kdist attached to a model.
        live: The analysed step, if there is one.
        rows: Of its batch.
    """
    topology, devices = parallel.topology, list(parallel.topology.devices)
    if topology.host_is_apart and parallel.uses_host:
        devices.append(topology.host)
    parameters, slots = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    for entry in parallel.entries.values():
        for at, local in entry.locals.items():
            parameters[entry.device(at)] += nbytes(local)
        for device, master in entry.masters:
            parameters[device] += nbytes(master)
    kept = dict.fromkeys(devices, 0)
    for update in updates_of(parallel):
        for one in itertools.chain(*update.jobs.local):
            slots[one.device] += sum(map(nbytes, one.optimizer.variables))
        for sums in update.sums.values():
            for copies in sums.sums.values():
                for (s, k), local in copies.items():
                    slots[sums.devices[s][k]] += nbytes(local)
    for variable in itertools.chain(*(update.jobs.kept for update in updates_of(parallel))):
        kept[Device.parse(variable.device).name] += _size(variable.shape) * variable.dtype.size
    found = (DeviceMemory(d, parameters[d], slots[d], kept[d]) for d in devices)
    if live is None:
        return tuple(found)
    return tuple(
        dataclasses.replace(
            one,
            gradients=live.peak(one.device, ("gradient",)).nbytes,
            gathered=live.peak(one.device, ("gathered",)).nbytes,
            both=live.peak(one.device, ("gradient", "gathered")).nbytes,
            activations=_activations(live.opened(), one.device),
            live=live.peak(one.device).nbytes,
            rows=rows,
        )
        for one in found
    )


def updates_of(parallel: Any) -> list[Any]:
    """What updates weights: with the compiled loss, and in steps of the user's own."""
    return [one for one in (parallel.update, *parallel.own_updates.made) if one is not None]


def _activations(live: LiveTensors, device: str) -> int | None:
    """Bytes of activations; None where what happens inside a call is not known."""
    return None if live.closed else live.peak(device, ("activation",)).nbytes


def closed(live: LiveTensors) -> str:
    """Why activations are not known, "" if they are."""
    calls = sorted(live.opened().closed)
    if not calls:
        return ""
    return (
        f"TensorFlow made variants of {len(calls)} functions, and does not tell what they take: "
        f"{calls[0]}{' and others' * (len(calls) > 1)}"
    )


def nbytes(variable: keras.Variable) -> int:
    """Bytes of the buffers behind a local variable; those of codes, if it is kept encoded."""
    backing = backing_of(variable)
    if backing is None:
        return _size(variable.shape) * tf.as_dtype(variable.dtype).size
    codes = getattr(backing, "codes", None)
    return 0 if codes is None else _size(codes.shape) * codes.dtype.size


def _size(shape: Sequence[Any]) -> int:
    return math.prod(int(n) for n in shape)


def analyse(parallel: Any, rows: int) -> LiveTensors | str:
    """The live tensors of a model's training step, or why they cannot be told.

    Args:
        parallel: What kdist attached to the model.
        rows: Of the batch to run it with.
    """
    if overrides(parallel.model, "train_step"):
        return "the model has its own train_step"
    if parallel.update is None or parallel.batch_specs is None:
        return "the model has not trained yet"
    if parallel.model.run_eagerly:
        return "run_eagerly: there is no graph"
    if parallel.jit_compile is True:
        return "jit_compile: XLA's programs are not read"
    step = parallel.step_for(None)
    specs = keras.tree.flatten(parallel.batch_specs)
    if any(None in s.shape[1:] for s in specs if s is not None):
        return f"dims of the batch are not known: {[s.shape for s in specs if s is not None]}"
    batch = keras.tree.map_structure(
        lambda s: None if s is None else tf.zeros((rows, *s.shape[1:]), s.dtype),
        parallel.batch_specs,
    )
    entries = parallel.entries.values()
    weights = [v for entry in entries for v in entry.locals.values()]
    weights += [master for entry in entries for _, master in entry.masters]
    if rows not in parallel.live:
        shared = parallel.topology.shares_memory
        parallel.live[rows] = live_tensors(step, batch, weights, shared_memory=shared)
    return parallel.live[rows]


def table(memory: Sequence[DeviceMemory]) -> str:
    """As text."""
    sizes = [[getattr(one, name) for name in _COLUMNS] for one in memory]
    return as_text(
        [Column("device"), *map(number, _COLUMNS.values())],
        [
            (one.device, *("-" if n is None else readable(n) for n in row))
            for one, row in zip(memory, sizes)
        ],
    )


_COLUMNS: Mapping[str, str] = {
    "parameters": "weights",
    "slots": "optimizer state",
    "compression": "compression",
    "gradients": "gradients",
    "gathered": "gathered",
    "both": "both",
    "activations": "activations",
    "live": "step",
}


def save_png(memory: Sequence[DeviceMemory], path: str | pathlib.Path, title: str = "") -> None:
    """Draws a stacked bar per device, with matplotlib (the extra `plot`).

    Args:
        memory: Per device.
        path: File to write.
        title: Of the picture.

    Raises:
        ImportError: Without matplotlib.
    """
    height = 1.3 + 0.4 * len(memory)
    figure = new_figure(7.5, height, "print(inspection)", dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(memory))
    left = [0.0] * len(memory)
    for label, color, sizes in _layers(memory):
        if not any(sizes):
            continue
        axes.barh(rows, [n / 2**20 for n in sizes], 0.7, left, color=color, label=label)
        left = [a + n / 2**20 for a, n in zip(left, sizes)]
    axes.set_yticks(rows, [one.device for one in memory])
    axes.invert_yaxis()
    axes.set_xlabel("MB (of 2^20 bytes)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=6, frameon=False, fontsize=8)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path, format="png")


def _layers(memory: Sequence[DeviceMemory]) -> list[tuple[str, str, list[int]]]:
    """Label, color and bytes per device of what is stacked.

    Of gradients and gathered parameters what can be there together is drawn, gradients first.
    """
    both = [one.both or 0 for one in memory]
    gradients = [min(one.gradients or 0, n) for one, n in zip(memory, both)]
    other = [(one.live or 0) - n for one, n in zip(memory, both)]
    return [
        ("weights", "#4C6A92", [one.parameters for one in memory]),
        ("optimizer state", "#8FA9C4", [one.slots for one in memory]),
        ("compression", "#B7A6C9", [one.compression for one in memory]),
        ("gradients", "#D98B5F", gradients),
        ("gathered", "#E8C18C", [n - g for n, g in zip(both, gradients)]),
        ("other", "#D5D8DC", other),
    ]
