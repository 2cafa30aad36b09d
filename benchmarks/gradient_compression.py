"""What compression saves and costs: the GPT example, trained the same way with and without it.

    sh run.sh python benchmarks/gradient_compression.py

Every row trains the same model, from the same weights, on the same windows in the same order, over
four replicas. "sent" are the bytes of gradients and new values that cross devices in a step, as
`model.plan()` counts them; tests/plan/test_exchange.py holds that to executed steps. State is
summed over devices. Results are kept with --keep: see results_file.py.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kdist
from kdist.display.tables import readable

import keras
import numpy as np
import results_file
from absl import flags
from rich.console import Console
from rich.table import Table

import benchmark_paths  # noqa: F401
import example_flags
import gpt_model
import text_data

HERE = Path(__file__).resolve().parent
CODES = kdist.StateFormatConfig(first="1-6-9", second="0-6-10")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train.

    Attributes:
        name: What is compressed.
        compression: Of the gradients.
        state_format: Of the moments.
    """

    name: str
    compression: kdist.CompressionConfig | None = None
    state_format: kdist.StateFormatConfig = kdist.StateFormatConfig()


def rows(rank: int) -> tuple[Row, ...]:
    """What is compared; the first row is what the others are measured by."""
    low_rank = kdist.CompressionConfig(rest=kdist.PowerSGD(rank=rank))
    return (
        Row(name="nothing"),
        Row(name="bf16 gradients", compression=kdist.CompressionConfig(rest="bf16")),
        Row(name=f"PowerSGD, rank {rank}", compression=low_rank),
        Row(name="16-bit moments", state_format=CODES),
        Row(name="PowerSGD and moments", compression=low_rank, state_format=CODES),
    )


def train(row: Row, args: Any, train_on: Any, held_out: Any) -> dict[str, Any]:
    """Trains one row; returns its figures."""
    keras.utils.set_random_seed(args.seed)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=args.replicas),
        compression=row.compression,
        optimizer=kdist.OptimizerConfig(state_format=row.state_format),
    )
    sizes = gpt_model.GPTSizes(256, args.length, args.width, args.depth, args.heads)
    model = kdist.parallelize(gpt_model.build(sizes), config)
    schedule = keras.optimizers.schedules.CosineDecay(
        args.learning_rate * 0.1,
        decay_steps=args.steps - args.steps // 15,
        alpha=0.05,
        warmup_target=args.learning_rate,
        warmup_steps=args.steps // 15,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(schedule, beta_2=0.95), loss)

    batches = [[part[i : i + args.batch] for part in train_on] for i in starts(args)]
    model.train_on_batch(*batches[0])  # compiles
    start = time.perf_counter()
    for batch in batches[1:]:
        model.train_on_batch(*batch)
    seconds = time.perf_counter() - start
    scalars = 12  # step counter and learning rate of each local optimizer
    memory = kdist.inspect(model).memory
    plan = model.plan()
    looked_up = args.batch // args.replicas * args.length
    return {
        "name": row.name,
        "loss": float(model.evaluate(*held_out, batch_size=args.batch, verbose=0)),
        "sent": sum(t.nbytes for t in plan.traffic())
        + sum(t.nbytes(looked_up) for t in plan.tables()),
        "moments": sum(m.slots - scalars for m in memory if m.slots),
        "kept": sum(m.compression for m in memory),
        "steps_per_s": (args.steps - 1) / seconds,
    }


def starts(args: Any) -> range:
    """Where each batch begins."""
    return range(0, args.steps * args.batch, args.batch)


def table(records: Sequence[dict[str, Any]]) -> Table:
    """The rows, and what they gain and lose against the first."""
    shown = Table(title="one step over the replicas, and the loss after the same steps")
    columns = ("compressed", "sent", "", "moments", "low rank", "loss", "", "steps/s")
    for column in columns:
        shown.add_column(column, justify="left" if column == "compressed" else "right")
    first = records[0]
    for r in records:
        shown.add_row(
            r["name"],
            readable(r["sent"]),
            f"/ {first['sent'] / r['sent']:.1f}",
            readable(r["moments"]),
            readable(r["kept"]),
            f"{r['loss']:.4f}",
            f"{r['loss'] / first['loss'] - 1:+.2%}",
            f"{r['steps_per_s']:.1f}",
        )
    return shown


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    for name, value in {
        "replicas": 4,
        "rank": 4,
        "steps": 200,
        "batch": 16,
        "length": 32,
        "width": 128,
        "depth": 2,
        "heads": 4,
        "seed": 0,
    }.items():
        flags.DEFINE_integer(name, value, name, lower_bound=0, flag_values=values)
    flags.DEFINE_float("learning_rate", 4e-3, "highest learning rate", flag_values=values)
    flags.DEFINE_float("megabytes", 2.0, "text to read", flag_values=values)
    flags.DEFINE_string("out", "", "JSON file to write", flag_values=values)
    flags.DEFINE_bool("keep", False, "write the tracked file of results", flag_values=values)
    return values


def main(argv: Sequence[str]) -> dict[str, Any]:
    """Runs the benchmark; returns what the JSON file holds."""
    args = example_flags.parse(_flags(), argv, str(__doc__))
    example_flags.start()
    rng = np.random.default_rng(args.seed)
    corpus = text_data.load(args.megabytes)
    train_on = text_data.windows(corpus.train, args.steps * args.batch, args.length, rng)
    held_out = text_data.windows(corpus.held_out, 64 * args.batch, args.length, rng)
    records = []
    for row in rows(args.rank):
        records.append(train(row, args, train_on, held_out))
        print(f"{row.name}: loss {records[-1]['loss']:.4f}", file=sys.stderr, flush=True)
    Console().print(table(records))
    settings = {k: v for k, v in args.flag_values_dict().items() if k not in ("out", "keep")}
    path = results_file.save("compression", settings, records, keep=args.keep, out=args.out)
    print(f"written: {path}", file=sys.stderr)
    return {"settings": settings, "rows": records}


if __name__ == "__main__":
    main(sys.argv)
