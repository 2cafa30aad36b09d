"""Bytes per parameter and device at every level of optimizer parallelism, beside the formula.

    python benchmarks/memory_levels.py --data=4 --picture=levels.png

One GPT per level, float32, Adam. Read from buffers and from the executed graph: nothing is timed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import kdist
from kdist.report import memory

import keras
import numpy as np
import results_file
from absl import app, flags

import benchmark_paths  # noqa: F401
import gpt_model

FLAGS = flags.FLAGS
flags.DEFINE_integer("data", 4, "replicas")
flags.DEFINE_integer("depth", 4, "blocks of the GPT")
flags.DEFINE_integer("width", 128, "features of a token")
flags.DEFINE_string("picture", "", "file for a picture, PNG")
flags.DEFINE_bool("keep", False, "write the tracked file of results")

FORMULA = {0: "16", 1: "8 + 8/N", 2: "4 + 12/N", 3: "16/N"}
COLUMNS = ("weights", "state", "gradients", "gathered", "both", "sum")
VALUES: dict[int, Callable[[int], float]] = {
    0: lambda n: 16,
    1: lambda n: 8 + 8 / n,
    2: lambda n: 4 + 12 / n,
    3: lambda n: 16 / n,
}


def measured(level: int) -> tuple[int, memory.DeviceMemory]:
    """Parameters of the GPT, and the device with the most bytes."""
    keras.utils.set_random_seed(0)
    sizes = gpt_model.GPTSizes(length=32, width=FLAGS.width, depth=FLAGS.depth)
    spread = kdist.OptimizerConfig(level=level, threshold_kb=4)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=FLAGS.data), optimizer=spread)
    model = kdist.parallelize(gpt_model.build(sizes), config)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = np.zeros((FLAGS.data, sizes.length), np.int32)
    model.train_on_batch(tokens, tokens)
    count = sum(math.prod(v.shape) for v in model.trainable_variables)
    found = kdist.inspect(model).memory
    return count, max(found, key=lambda m: m.parameters + m.slots + (m.both or 0))


def main(_: list[str]) -> None:
    """Prints a table in Markdown."""
    kdist.init(cpu_devices=FLAGS.data)
    n, bars, rows = FLAGS.data, [], []
    print(f"| level | formula, N = {n} | {' | '.join(COLUMNS)} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for level, text in FORMULA.items():
        count, most = measured(level)
        value = VALUES[level](n)
        parts = (most.parameters, most.slots, most.gradients, most.gathered, most.both)
        total = most.parameters + most.slots + (most.both or 0)
        each = [(part or 0) / count for part in (*parts, total)]
        numbers = " | ".join(f"{one:.2f}" for one in each)
        print(f"| {level} | {text} = {value:.2f} | {numbers} |", flush=True)
        rows.append({"level": level, "formula": value, **dict(zip(COLUMNS, each))})
        bars.append(dataclasses.replace(most, device=f"level {level}"))
    settings = {"data": n, "depth": FLAGS.depth, "width": FLAGS.width}
    path = results_file.save(f"memory_levels_data{n}", settings, rows, keep=FLAGS.keep)
    print(f"written: {path}")
    if FLAGS.picture:
        memory.save_png(bars, FLAGS.picture, f"Memory of a device, data {n}")


if __name__ == "__main__":
    app.run(main)
