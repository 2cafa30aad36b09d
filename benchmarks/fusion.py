"""What fusing the gradients of many small parameters saves, in one process and across two.

    sh run.sh python benchmarks/fusion.py

In one process the training step of a deep, narrow model is timed under several `FusionConfig`s, in
interleaved rounds. Across two processes the same gradients are all-reduced one by one, and as one
tensor, with `kdist.comm`. Shown are medians and ratios within this run. Results are
kept with --keep: see results_file.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import kdist
from kdist import FusionConfig
from kdist.comm import connect
from kdist.comm.processes import local_addresses

import keras
import numpy as np
import results_file
import tensorflow as tf
from absl import app, flags
from rich.console import Console
from rich.table import Table

_DEPTH = flags.DEFINE_integer("depth", 30, "Dense layers of the model.", 1)
_WIDTH = flags.DEFINE_integer("width", 32, "Units of a layer.", 1)
_REPLICAS = flags.DEFINE_integer("replicas", 8, "Replicas in one process.", 2)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.", 1)
_STEPS = flags.DEFINE_integer("steps", 5, "Steps in a round.", 1)
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_KEEP = flags.DEFINE_bool("keep", False, "Write the tracked file of results.")
_ADDRESSES = flags.DEFINE_list("addresses", None, "Of the processes; set by the first one.")
_INDEX = flags.DEFINE_integer("index", None, "Of this process; set by the first one.")

CONFIGS = {
    "unfused": FusionConfig(mode="none"),
    "auto": FusionConfig(),
    "one bucket of 64 MB": FusionConfig(mode="size"),
}
LEVELS = (0, 1)
MARK = "@fusion "


def build() -> keras.Model:
    """A narrow, deep model: two small parameters a layer."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((_WIDTH.value,))
    for _ in range(_DEPTH.value):
        x = keras.layers.Add()([x, keras.layers.Dense(_WIDTH.value, "tanh")(x)])
    return keras.Model(inputs, x)


def stepper(fusion: FusionConfig, level: int) -> tuple[Callable[[], float], int]:
    """A function that runs one step and returns its seconds; and the collectives of a step."""
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=_REPLICAS.value),
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        fusion=fusion,
    )
    model = kdist.parallelize(build(), config)
    model.compile("adam", "mse")
    batch = np.ones((4 * _REPLICAS.value, _WIDTH.value), "float32")

    def step() -> float:
        start = time.perf_counter()
        model.train_on_batch(batch, batch)
        return time.perf_counter() - start

    step()
    return step, sum(t.collectives for t in model.plan().traffic())


def in_one_process() -> list[dict[str, Any]]:
    """Step times per level and setting."""
    records, steps = [], []
    for level in LEVELS:
        for name, fusion in CONFIGS.items():
            step, collectives = stepper(fusion, level)
            steps.append(step)
            records.append({"level": level, "fusion": name, "collectives": collectives})
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_ROUNDS.value):
        for step, found in zip(steps, times):
            found += [step() for _ in range(_STEPS.value)]
    for record, found in zip(records, times):
        record["seconds"] = statistics.median(found)
    return records


def member(addresses: Sequence[str], index: int) -> dict[str, Any]:
    """One of the processes: all-reduces the gradients one by one, and as one tensor."""
    kdist.init(cpu_devices=1)
    connect(addresses, index)
    names = [f"/job:worker/task:{task}/device:CPU:0" for task in range(len(addresses))]
    mesh = keras.distribution.DeviceMesh((len(names),), ["data"], names)
    gradients = [tf.ones(v.shape) for v in build().trainable_variables]

    @tf.function(autograph=False)
    def unfused() -> list[Any]:
        return [kdist.comm.all_reduce([g], mesh, "data")[0][:1] for g in gradients]

    @tf.function(autograph=False)
    def fused() -> Any:
        one = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)
        return kdist.comm.all_reduce([one], mesh, "data")[0][:1]

    times: dict[str, list[float]] = {"unfused": [], "fused": []}
    for round_ in range(_ROUNDS.value + 1):
        for name, function in (("unfused", unfused), ("fused", fused)):
            for _ in range(_STEPS.value):
                start = time.perf_counter()
                function()
                if round_:
                    times[name].append(time.perf_counter() - start)
    found = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {"tensors": len(gradients), **found}


def across_processes(count: int = 2) -> dict[str, Any]:
    """Starts the processes; returns what the first one measured."""
    addresses = ",".join(local_addresses(count))
    command = [sys.executable, __file__, *sys.argv[1:], f"--addresses={addresses}"]
    members = [
        subprocess.Popen([*command, f"--index={n}"], stdout=subprocess.PIPE, text=True)
        for n in range(count)
    ]
    try:
        texts = [one.communicate(timeout=300)[0] for one in members]
    finally:
        for one in members:
            one.kill()
    (line,) = (t for t in texts[0].splitlines() if t.startswith(MARK))
    return json.loads(line.removeprefix(MARK))


def show(local: Sequence[dict[str, Any]], remote: dict[str, Any]) -> None:
    """Prints both tables."""
    console = Console()
    layers = f"{_DEPTH.value} layers of {_WIDTH.value}, {_REPLICAS.value} replicas"
    table = Table(title=f"training step in one process: {layers}")
    for column in ("level", "fusion", "collectives", "step, ms", "to unfused"):
        table.add_column(column, justify="left" if column == "fusion" else "right")
    base = {r["level"]: r["seconds"] for r in local if r["fusion"] == "unfused"}
    for r in local:
        ms, ratio = f"{1e3 * r['seconds']:.1f}", f"{r['seconds'] / base[r['level']]:.2f}"
        table.add_row(str(r["level"]), r["fusion"], str(r["collectives"]), ms, ratio)
    console.print(table)
    table = Table(title="all-reduce of the same gradients across two processes")
    for column in ("", "collectives", "ms", "to unfused"):
        table.add_column(column, justify="right" if column else "left")
    for name, count in (("unfused", remote["tensors"]), ("fused", 1)):
        ratio = f"{remote[name] / remote['unfused']:.3f}"
        table.add_row(name, str(count), f"{1e3 * remote[name]:.1f}", ratio)
    console.print(table)


def main(_: list[str]) -> None:
    """Runs both parts, or, started by the first process, one member of the second."""
    if _INDEX.value is not None:
        print(MARK + json.dumps(member(_ADDRESSES.value or [], _INDEX.value)), flush=True)
        return
    remote = across_processes()
    kdist.init(cpu_devices=_REPLICAS.value)
    local = in_one_process()
    show(local, remote)
    sizes = (_DEPTH, _WIDTH, _REPLICAS, _ROUNDS, _STEPS)
    settings = {one.name: one.value for one in sizes}
    found = {"in_one_process": local, "across_processes": remote}
    path = results_file.save("fusion", settings, found, keep=_KEEP.value, out=_OUT.value or "")
    print(f"written: {path}")


if __name__ == "__main__":
    app.run(main)
