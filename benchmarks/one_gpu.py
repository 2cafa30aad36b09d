"""Measures training steps on one GPU: plain Keras, kdist, and meshes over parts of the card.

    python benchmarks/one_gpu.py             a GPT of 4 blocks, width 768, and a deep small model

A mesh of several devices is over logical devices of the one card. They share its arithmetic, so
that no mesh can be faster than plain Keras: what the rows show is what kdist's steps cost beside
it, in time, and in the memory of a device. Each row is a process of its own that stays alive,
with its share of the card's memory; rounds go through all rows of a model in turn.
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

SIZES = rows.Sizes(layers=4, width=768, length=256, vocabulary=8192, batch=8)
ROWS = (
    dataclasses.replace(rows.PLAIN, name="plain Keras, without XLA", xla=False),
    rows.PLAIN,
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

DEEP_ROWS = (
    dataclasses.replace(rows.PLAIN, name="plain Keras, deep and small", xla=False),
    rows.Configuration("kdist, data 1, deep and small", "kdist", (("data", 1),), xla=False),
    *rows.DEEP_ROWS[1:],
)

flags.DEFINE_integer("rounds", 5, "interleaved rounds", lower_bound=1)
flags.DEFINE_integer("steps", 10, "steps of a row in a round", lower_bound=1)
flags.DEFINE_integer("memory_mb", 72_000, "of the card, for all rows together", lower_bound=1)
flags.DEFINE_bool("together", False, "start all rows at once: first steps are not to be compared")
flags.DEFINE_bool("deep", True, "run the deep small model too")
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
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(SIZES)}
    settings = {"rounds": args.rounds, "steps_in_a_round": args.steps, **sizes}
    groups = [(ROWS, rows.Sizes(**sizes)), *([(DEEP_ROWS, rows.DEEP_SMALL)] if args.deep else [])]
    records: list[dict[str, Any]] = []
    out = args.out
    for group, size in groups:  # shown and kept as they come: time on a card can run out
        chosen = [dataclasses.replace(r, sizes=size) for r in group if args.only in r.name]
        os.environ[ON_GPU] = str(args.memory_mb // max(1, len(chosen)))
        found = step_time.measure(chosen, {}, args.rounds, args.steps, together=args.together)
        show(found)
        records += found
        out = str(results_file.save("one_gpu", settings, records, keep=args.keep, out=out))
    Console(stderr=True).print(f"written: {out}")


def show(records: list[dict[str, Any]]) -> None:
    """Prints the table."""
    from kdist.display.tables import Column, number, table

    cells, base = [], float("nan")
    for record in records:
        if not record.get("steps_s"):
            cells.append((record["name"], "failed", "", "", "", ""))
            continue
        seconds = statistics.median(record["steps_s"])
        if record["runner"] == "plain" and record["xla"] is not None:
            base = seconds  # of the rows that follow it
        cells.append(
            (
                record["name"],
                f"{record['first_step_s']:.1f}",
                f"{1000 * seconds:.1f}",
                f"{seconds / base:.2f}",
                " ".join(f"{one:.0f}" for one in record["gpu_peak_mib"]),
                f"{record['first_loss']:.4f} {record['second_loss']:.4f}",
            )
        )
    titles = ("first, s", "step, ms", "to plain without XLA", "peak MiB of each device", "losses")
    shown = Console()
    columns = [Column("configuration"), *map(number, titles)]
    shown.print(table("training step on one GPU", columns, cells, shown.width))


if __name__ == "__main__":
    sys.exit(app.run(main))
