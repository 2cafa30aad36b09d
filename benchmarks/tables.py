"""Steps of a model with one large table: where it is, and which rows its optimizer touches.

    python benchmarks/tables.py
    python benchmarks/tables.py --vocabulary=100000 --steps=5    # short

Against Keras with an `Embedding` on one device. Steps of all models are timed in turn, so that
ratios hold on a machine that is busy. Rows and bytes between host and devices are the plan's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist.layers import DistributedEmbedding, FeatureConfig, TableConfig

import keras
import numpy as np
import results_file
from absl import app, flags
from rich.console import Console
from rich.table import Table

FLAGS = flags.FLAGS
flags.DEFINE_integer("vocabulary", 1_000_000, "rows of the table")
flags.DEFINE_integer("width", 16, "columns of the table")
flags.DEFINE_integer("ids", 8, "look-ups of an example")
flags.DEFINE_integer("rows", 64, "examples of a batch")
flags.DEFINE_integer("data", 2, "replicas")
flags.DEFINE_integer("steps", 15, "steps that are timed, per variant")
flags.DEFINE_list("optimizers", ["adagrad", "adam"], "of the table")
flags.DEFINE_bool("keep", False, "write the tracked file of results")

VARIANTS: dict[str, dict[str, Any] | None] = {
    "Keras, one device": None,
    "device, dense": {"placement": "device", "dense": True},
    "device, lazy": {"placement": "device"},
    "host, dense": {"placement": "host", "dense": True},
    "host, lazy": {"placement": "host"},
}
"""By name, how the table is declared; None for Keras."""


def built(optimizer: str, table: dict[str, Any] | None) -> keras.Model:
    """A compiled model."""
    keras.utils.set_random_seed(0)
    options = {} if table is None else {**table, "optimizer": optimizer}
    feature = FeatureConfig(
        "ids",
        TableConfig("table", FLAGS.vocabulary, FLAGS.width, **options),
        (None, FLAGS.ids),
        (None, FLAGS.width),
    )
    ids = keras.Input((FLAGS.ids,), dtype="int32")
    if table is None:
        x = keras.layers.Embedding(FLAGS.vocabulary, FLAGS.width, name="table")(ids)
        x = keras.ops.mean(x, 1)
    else:
        x = DistributedEmbedding(feature)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Dense(64, "relu")(x)))
    if table is not None:
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=FLAGS.data)))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def traffic(model: keras.Model, batch: np.ndarray) -> dict[str, int]:
    """Rows and bytes of a step between host and devices."""
    tables = model.plan().host_tables() if hasattr(model, "plan") else []
    if not tables:
        return {}
    (one,) = tables
    unique = max(len(np.unique(part)) for part in np.array_split(batch, FLAGS.data))
    down, up = one.sent(unique, batch.size // FLAGS.data)
    return {"rows": unique * FLAGS.data, "to_devices": down, "to_host": up}


def timed(steps: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of the steps of each variant, in turn, after two of each."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(FLAGS.steps + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number > 1:
                found[name].append(time.perf_counter() - start)
    return found


def main(_: list[str]) -> None:
    """Times all variants, prints a table, writes a file."""
    kdist.init(cpu_devices=FLAGS.data + 1)
    rng = np.random.default_rng(0)
    batch = rng.integers(0, FLAGS.vocabulary, (FLAGS.rows, FLAGS.ids)).astype("int32")
    targets = np.zeros((FLAGS.rows, 1), "float32")
    shown = Table("optimizer", "table", title="a step")
    for title in ("ms", "by Keras", "rows", "to devices", "to the host"):
        shown.add_column(title, justify="right")
    rows = []
    for optimizer in FLAGS.optimizers:
        models = {name: built(optimizer, table) for name, table in VARIANTS.items()}
        steps = {
            name: functools.partial(model.train_on_batch, batch, targets)
            for name, model in models.items()
        }
        times = timed(steps)
        plain = times["Keras, one device"]
        for name, model in models.items():
            sent = traffic(model, batch)
            ratios = [a / b for a, b in zip(times[name], plain, strict=True)]
            row = {
                "optimizer": optimizer,
                "table": name,
                "seconds": results_file.spread_of(times[name]),
                "by_keras": results_file.spread_of(ratios),
                **sent,
            }
            rows.append(row)
            shown.add_row(
                optimizer,
                name,
                f"{1e3 * row['seconds']['median']:.1f}",
                f"{row['by_keras']['median']:.3f}",
                *(f"{sent[key]:,}" if sent else "" for key in ("rows", "to_devices", "to_host")),
            )
    Console().print(shown)
    settings = {name: FLAGS[name].value for name in ("vocabulary", "width", "ids", "rows", "data")}
    print(results_file.save("tables", settings, rows, keep=FLAGS.keep))


if __name__ == "__main__":
    app.run(main)
