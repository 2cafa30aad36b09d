"""What cutting convolutions by channels costs and saves, beside replicas and levels.

    sh run.sh python benchmarks/convolutions.py

A network of convolutions, in pairs with pooling after each, is trained on four devices: as
replicas, as replicas at level 3, and with the map that `kdist.layout_map_for` finds. All do the
same arithmetic. Times are medians of interleaved rounds, compared within this run. Bytes are the
most that a device keeps of weights and optimizer state, and has of activations, as `kdist.inspect`
says; those that collectives inside layers give in a slice; and those that travel outside of layers.
Results are kept with --keep: see results_file.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist.display.tables import Column, number, readable, table

import keras
import numpy as np
import results_file
from absl import app, flags
from rich.console import Console

_SIDE = flags.DEFINE_integer("side", 32, "Pixels of a picture's side.", 8)
_FILTERS = flags.DEFINE_integer("filters", 32, "Of the first pair; each further has twice.", 4)
_PAIRS = flags.DEFINE_integer("pairs", 4, "Pairs of convolutions.", 1)
_BATCH = flags.DEFINE_integer("batch", 32, "Pictures in a global batch.", 4)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved rounds.", 1)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps in a round.", 1)
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_KEEP = flags.DEFINE_bool("keep", False, "Write the tracked file of results.")

CLASSES = 10
WAYS: Mapping[str, tuple[Mapping[str, int], int]] = {
    "data 4": ({"data": 4}, 0),
    "data 4, level 3": ({"data": 4}, 3),
    "data 2 x model 2": ({"data": 2, "model": 2}, 0),
    "data 2 x model 2, level 3": ({"data": 2, "model": 2}, 3),
    "model 4": ({"model": 4}, 0),
}
"""Axes of the mesh, and the level of optimizer parallelism."""


def build() -> keras.Model:
    """Pairs of convolutions; the pictures halve and the channels double from one to the next."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((_SIDE.value, _SIDE.value, 3))
    for n in range(_PAIRS.value):
        for half in ("up", "down"):
            filters = _FILTERS.value * 2**n
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"{half}{n}")(
                x
            )
            x = keras.layers.BatchNormalization(name=f"{half}{n}_norm")(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="pictures")


def stepper(axes: Mapping[str, int], level: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """A function that runs one step and returns its seconds; and bytes of a device."""
    sizes: dict[str, Any] = dict(axes)
    model = build()
    mesh = kdist.mesh(**sizes)
    config = kdist.ParallelConfig(
        mesh=mesh,
        layout_map=kdist.layout_map_for(model, mesh) if "model" in sizes else {},
        optimizer=kdist.OptimizerConfig(level=level),
    )
    kdist.parallelize(model, config)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH.value, _SIDE.value, _SIDE.value, 3)).astype("float32")
    y = rng.integers(0, CLASSES, _BATCH.value)

    def step() -> float:
        start = time.perf_counter()
        model.train_on_batch(x, y)
        return time.perf_counter() - start

    step()
    found = kdist.inspect(model, _BATCH.value)
    return step, {
        "kept": max(one.parameters + one.slots for one in found.memory),
        "activations": max(one.activations or 0 for one in found.memory),
        "inside": sum(one.bytes for one in found.collectives),
        "outside": sum(one.nbytes for one in found.plan.traffic()),
    }


def main(_: list[str]) -> None:
    """Measures every way, prints a table, and writes the results."""
    kdist.init(cpu_devices=4)
    console = Console(stderr=True)
    steps, rows = [], []
    for name, (axes, level) in WAYS.items():
        with console.status(f"{name}: first step"):
            step, counted = stepper(axes, level)
        steps.append(step)
        rows.append({"name": name, **counted})
    times: list[list[float]] = [[] for _ in steps]
    for n in range(_ROUNDS.value):
        with console.status(f"round {n + 1} of {_ROUNDS.value}"):
            for step, seconds in zip(steps, times):
                seconds += [step() for _ in range(_STEPS.value)]
    for row, seconds in zip(rows, times):
        row["seconds"] = results_file.spread_of(seconds)
    base = rows[0]["seconds"]["median"]
    cells = [
        (
            row["name"],
            f"{1e3 * row['seconds']['median']:.0f}",
            f"{row['seconds']['median'] / base:.2f}",
            *(readable(row[one]) for one in ("kept", "activations", "inside", "outside")),
        )
        for row in rows
    ]
    titles = ("step, ms", "to data 4", "kept", "activations", "inside layers", "outside")
    columns = [Column("mesh"), *map(number, titles)]
    shown = Console()
    shown.print(table("convolutions on four devices", columns, cells, shown.width))
    settings = {one.name: one.value for one in (_SIDE, _FILTERS, _PAIRS, _BATCH, _ROUNDS, _STEPS)}
    path = results_file.save("convolutions", settings, rows, keep=_KEEP.value, out=_OUT.value or "")
    print(f"written: {path}")


if __name__ == "__main__":
    app.run(main)
