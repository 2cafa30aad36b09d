"""Memory for activations against the time of a step, by what is computed again.

    python benchmarks/recompute.py --picture=recompute.png
    python benchmarks/recompute.py --depth=3 --tenths=2,6 --steps=4    # short

One GPT per policy in one process: memory is read from executed graphs, by `kdist.inspect`; steps of
all models are timed in turn, so that ratios hold on a machine that is busy. Budgets are tenths of
the way from the peak of full recompute to that of none. `--allocator` has the process's allocator
confirm the analysis (oneDNN must be on): the most that it had in a step, over what the analysis
says that all devices may have.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import kdist
from kdist.api.attached import attached
from kdist.graphs.in_order import peak_in_order

import keras
import numpy as np
import results_file
import tensorflow as tf
from absl import app, flags

import benchmark_paths  # noqa: F401
import gpt_model

FLAGS = flags.FLAGS
flags.DEFINE_integer("data", 2, "replicas")
flags.DEFINE_integer("depth", 12, "blocks of the GPT")
flags.DEFINE_integer("width", 128, "features of a token")
flags.DEFINE_integer("length", 64, "tokens of a sequence")
flags.DEFINE_integer("rows", 16, "rows of a batch")
flags.DEFINE_integer("steps", 15, "steps that are timed, per policy")
flags.DEFINE_list("tenths", [str(n) for n in range(1, 10)], "budgets")
flags.DEFINE_bool("allocator", False, "compare with the allocator")
flags.DEFINE_string("picture", "", "file for a picture, PNG")
flags.DEFINE_bool("keep", False, "write the tracked file of results")

MB = 2**20
BARS = {"full": (1 / 3, 1.4), "selective": (2 / 3, 1.1)}
"""By policy: the most memory and the most time that it may take, of those without recompute."""


class Trained:
    """A model that has made one step."""

    def __init__(self, name: str, replicas: int, **policy: Any) -> None:
        self.name = name
        keras.utils.set_random_seed(0)
        sizes = gpt_model.GPTSizes(length=FLAGS.length, width=FLAGS.width, depth=FLAGS.depth)
        again = kdist.RecomputeConfig(layers=[r"block_(\d+)_.*"], **policy) if policy else None
        config = kdist.ParallelConfig(mesh=kdist.mesh(data=replicas), recompute=again)
        self.model = kdist.parallelize(gpt_model.build(sizes), config)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile("sgd", loss)
        self.tokens = np.zeros((FLAGS.rows, sizes.length), np.int32)
        self.step()
        self.times: list[float] = []
        self.memory = kdist.inspect(self.model, FLAGS.rows).memory

    @property
    def activations(self) -> int:
        """Bytes, on the device that has the most."""
        return max(one.activations or 0 for one in self.memory)

    def step(self) -> float:
        """Makes a step; how long it took, in seconds."""
        start = time.perf_counter()
        self.model.train_on_batch(self.tokens, self.tokens)
        return time.perf_counter() - start

    def row(self, whole: Trained) -> dict[str, Any]:
        """What was measured, alone and by what no recompute takes."""
        ratios = [a / b for a, b in zip(self.times, whole.times, strict=True)]
        choices = [note for note in self.model.plan().notes if note.startswith("recompute")]
        return {
            "policy": self.name,
            "activations": self.activations,
            "memory": self.activations / whole.activations,
            "time": results_file.spread_of(self.times),
            "ratio": results_file.spread_of(ratios),
            "choice": choices,
        }


def allocated(one: Trained) -> dict[str, Any]:
    """What a step takes by the allocator, and by the analysis."""
    one.step()
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    one.step()
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
    live = attached(one.model).live[FLAGS.rows].opened()
    said = sum(live.peak(device).nbytes for device in live.devices)
    order = peak_in_order(live)
    return {
        "policy": one.name,
        "allocator": peak,
        "analysis": said,
        "ratio": peak / said,
        "one order": order,
        "ratio of one order": peak / order,
    }


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draws memory against time, as PNG."""
    from kdist.display.figure import new_figure

    figure = new_figure(6.5, 4.2, "the table", dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for one in rows:
        x, y = one["ratio"]["median"], one["memory"]
        color = "#4C6A92" if one["policy"].startswith("budget") else "#D98B5F"
        axes.plot([x], [y], "o", color=color)
        axes.annotate(one["policy"], (x, y), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("time of a step, without recompute = 1")
    axes.set_ylabel("activations, without recompute = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def measured() -> list[dict[str, Any]]:
    """A row per policy; prints them."""
    none, full = Trained("none", FLAGS.data), Trained("full", FLAGS.data, policy="full")
    every = [none, full, Trained("selective", FLAGS.data, policy="selective")]
    for tenth in map(int, FLAGS.tenths):
        budget = full.activations + (none.activations - full.activations) * tenth / 10
        name = f"budget {tenth}/10"
        every.append(Trained(name, FLAGS.data, policy="budget", budget_mb=budget / MB))
        most = every[-1].activations
        assert most <= budget, f"{name}: {most} bytes of activations, more than {budget}"
    for number in range(FLAGS.steps + 1):
        for one in every:
            taken = one.step()
            one.times += [taken] if number else []
    print("| policy | activations | memory | time | ratio |\n| --- | --- | --- | --- | --- |")
    rows = [one.row(none) for one in every]
    for row in rows:
        print(
            f"| {row['policy']} | {row['activations'] / MB:.2f} MB | {row['memory']:.2f} "
            f"| {1e3 * row['time']['median']:.1f} ms | {row['ratio']['median']:.2f} |",
            flush=True,
        )
        if (bars := BARS.get(row["policy"])) is not None:
            kept = row["memory"] <= bars[0] and row["ratio"]["median"] <= bars[1]
            print(f"  bars {bars[0]:.2f} of the memory at {bars[1]} of the time: {kept}")
    return rows


def main(_: list[str]) -> None:
    """Prints a table in Markdown."""
    kdist.init(cpu_devices=FLAGS.data)
    name = f"recompute_data{FLAGS.data}"
    if FLAGS.allocator:
        policies: dict[str, dict[str, Any]] = {"none": {}, "full": {"policy": "full"}}
        rows = [allocated(Trained(one, FLAGS.data, **how)) for one, how in policies.items()]
        name = "recompute_allocator"
        for row in rows:
            print(row, flush=True)
    else:
        rows = measured()
        if FLAGS.picture:
            draw(rows, FLAGS.picture)
    names = ("data", "depth", "width", "length", "rows", "steps")
    settings = {flag: getattr(FLAGS, flag) for flag in names}
    print(f"written: {results_file.save(name, settings, rows, keep=FLAGS.keep)}")


if __name__ == "__main__":
    app.run(main)
