"""Bytes of each way of looking rows of a split table up, counted in executed steps.

    python benchmarks/look_ups.py --devices=4 --rows=64 --width=16

Every replica looks up as many different rows in each part. Nothing is timed.
"""

from __future__ import annotations

from typing import Any

import kdist
from kdist.graphs import executed
from kdist.plan.split_traffic import WayTraffic
from kdist.report.look_ups import SentByLookUps, sent_by_look_ups

import keras
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

FLAGS = flags.FLAGS
flags.DEFINE_integer("devices", 4, "of the axis")
flags.DEFINE_integer("rows", 64, "different rows that a replica looks up; the devices divide them")
flags.DEFINE_integer("width", 16, "columns of the table; the devices divide them")

PART = 1000
"""Rows of each part."""
WAYS: dict[str, dict[str, Any]] = {
    "blocks": {"enable_alltoall": True},
    "masked": {},
    "columns": {},
    "local": {},
}


def measured(way: str, axis: str) -> tuple[WayTraffic, SentByLookUps, int]:
    """What is planned, what was sent, and its bytes."""
    devices, each = FLAGS.devices, FLAGS.rows // FLAGS.devices
    local = way == "local"
    ids = keras.Input((devices if local else FLAGS.rows,), dtype="int32")
    sizes: tuple[Any, Any] = ([PART] * devices, FLAGS.width)
    if way == "columns":
        sizes = PART * devices, [FLAGS.width // devices] * devices
    table = kdist.layers.SplitEmbedding(*sizes, axis=axis, local_columns=local, name="table")
    x = keras.layers.Dense(1, name="head")(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, x)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**{axis: devices}),
        layout_map={"head/kernel": ("model", None)} if axis == "model" else {},
        **WAYS[way],
    )
    kdist.parallelize(model, config).compile("adam", "mse")
    replicas = devices if axis == "data" else 1
    numbers = np.arange(replicas * each).reshape(-1, 1) + PART * np.arange(devices)
    batch = numbers.reshape(-1, ids.shape[1]).astype("int32")
    targets = np.zeros((len(batch), 1))
    step = executed.largest(executed.watch(lambda: model.train_on_batch(batch, targets)))
    sent = sent_by_look_ups(step)
    width = FLAGS.width // devices if way == "columns" else FLAGS.width
    asked = each if way in ("blocks", "local") else FLAGS.rows
    (planned,) = model.plan().split_tables()
    return planned.used, sent, sent.nbytes(asked, width, FLAGS.rows)


def main(_: list[str]) -> None:
    """Prints a table."""
    kdist.init(cpu_devices=FLAGS.devices)
    table = Table("axis", "way", title="what look-ups send in a step, gradients apart")
    for title in ("messages", "planned", "bytes", "at most"):
        table.add_column(title, justify="right")
    for axis in ("data", "model"):
        for way in WAYS:
            planned, sent, nbytes = measured(way, axis)
            limit = planned.nbytes(FLAGS.rows, FLAGS.rows)
            numbers = (sent.messages, planned.messages, nbytes, limit)
            table.add_row(axis, planned.way, *(f"{n:,}" for n in numbers))
    Console().print(table)


if __name__ == "__main__":
    app.run(main)
