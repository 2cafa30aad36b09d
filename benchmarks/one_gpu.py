"""Measures training steps on one GPU: plain Keras, kdist, and meshes over parts of the card.

    python benchmarks/one_gpu.py                       a GPT of 8 blocks, width 1024
    python benchmarks/one_gpu.py --layers=24 --width=16 --length=8 --vocabulary=64 --batch=8

A mesh of several devices is over logical devices of the one card. They share its arithmetic, so
that no mesh can be faster than plain Keras: what the rows show is what kdist's steps cost beside
it, in time, and in the memory of a device. Rows run one after the other, each in a process of
its own that has the card for itself; run it twice to see the noise.
"""

import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import results_file
import step_time
from absl import app, flags
from rich.console import Console

import step_configurations as rows
from step_worker import ON_GPU

SIZES = rows.Sizes(layers=8, width=1024, length=512, vocabulary=32000, batch=16)
ROWS = (
    rows.PLAIN,
    dataclasses.replace(rows.PLAIN, name="plain Keras, without XLA", xla=False),
    rows.Configuration("kdist, data 1", "kdist", (("data", 1),)),
    rows.Configuration("kdist, data 1, without XLA", "kdist", (("data", 1),), xla=False),
    rows.Configuration("kdist, data 4", "kdist", (("data", 4),)),
    rows.Configuration("kdist, data 4, level 3", "kdist", (("data", 4),), level=3),
    rows.Configuration("kdist, model 4", "kdist", (("model", 4),)),
    rows.Configuration("kdist, data 2 x model 2", "kdist", (("data", 2), ("model", 2))),
    rows.Configuration(
        "kdist, data 2 x model 2, XLA", "kdist", (("data", 2), ("model", 2)), xla=True
    ),
    rows.Configuration("kdist, pipe 2 x data 2", "kdist", (("pipe", 2), ("data", 2))),
)

flags.DEFINE_integer("steps", 20, "measured steps of a row", lower_bound=1)
flags.DEFINE_string("only", "", "run rows whose name has this text")
flags.DEFINE_string("out", "", "JSON file to write")
flags.DEFINE_bool("keep", False, "write the tracked file of results")
for field in dataclasses.fields(SIZES):
    flags.DEFINE_integer(field.name, getattr(SIZES, field.name), "size", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark and prints its table."""
    if argv[1:]:
        raise app.UsageError(f"Options start with --. Received: {argv[1:]}")
    args = flags.FLAGS
    os.environ[ON_GPU] = "1"
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(SIZES)}
    chosen = (
        dataclasses.replace(row, sizes=rows.Sizes(**sizes)) for row in ROWS if args.only in row.name
    )
    records: list[dict[str, Any]] = []
    for row in chosen:
        records += step_time.measure([row], {}, 1, args.steps)
    show(records)
    path = results_file.save("one_gpu", sizes, {"rows": records}, keep=args.keep, out=args.out)
    Console(stderr=True).print(f"written: {path}")


def show(records: list[dict[str, Any]]) -> None:
    """Prints the table."""
    from kdist.display.tables import Column, number, table

    times = [statistics.median(r["steps_s"]) if r.get("steps_s") else None for r in records]
    cells = []
    for record, seconds in zip(records, times, strict=True):
        if seconds is None:
            cells.append((record["name"], "failed", "", "", "", ""))
            continue
        cells.append(
            (
                record["name"],
                f"{record['first_step_s']:.1f}",
                f"{1000 * seconds:.1f}",
                f"{seconds / times[0]:.2f}" if times[0] else "",
                " ".join(f"{one:.0f}" for one in record["gpu_peak_mib"]),
                f"{record['first_loss']:.4f} {record['second_loss']:.4f}",
            )
        )
    titles = ("first, s", "step, ms", "to plain", "peak MiB of each device", "losses")
    shown = Console()
    columns = [Column("configuration"), *map(number, titles)]
    shown.print(table("training step on one GPU", columns, cells, shown.width))


if __name__ == "__main__":
    sys.exit(app.run(main))
