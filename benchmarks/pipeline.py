"""Measures pipelines against one device, on one machine.

    python benchmarks/pipeline.py [--rounds 5] [--json benchmarks/results/pipeline.json]

Every row is a process of its own; the rounds go through all of them in turn. Shown is the best of
the rounds: what other work on the machine adds only makes times longer. The first step includes
tracing. "Memory" is the peak of a step beyond what is there between steps.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.table import Table

MARK = "@pipeline "
LAYERS, WIDTH, BATCH = 8, 512, 2048
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        name: How it is shown.
        stages: Stages of the pipeline; 0 is plain Keras on one device.
        micro_batches: Micro-batches.
        schedule: Its schedule.
        cores: Cores that the process may use; 0 for all.
        data: Replicas.
        model: Size of the axis `model`.
        gpt: Whether it is the GPT example's model, instead of the MLP.
    """

    name: str
    stages: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    cores: int = 0
    data: int = 1
    model: int = 1
    gpt: bool = False

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return max(self.stages, 1) * self.data * self.model


ROWS = (
    Row("one device, one core", cores=1),
    Row("one device"),
    Row("2 stages, 8 micro-batches", 2, 8),
    Row("4 stages, 8 micro-batches, gpipe", 4, 8, "gpipe"),
    Row("4 stages, 8 micro-batches", 4, 8),
    Row("4 stages, 8 micro-batches, zero bubble", 4, 8, "zero_bubble"),
    Row("4 stages, 16 micro-batches", 4, 16),
    Row("GPT, one device", gpt=True),
    Row("GPT, pipe 2 x data 2 x model 2", 2, 2, data=2, model=2, gpt=True),
)
"""The MLP and the GPT of the bars: a whole batch on one device against its micro-batches."""
GPT_LENGTH, GPT_BATCH = 128, 32


def work(row: Row) -> None:
    """Runs one row: answers first step and memory, then the times of steps, until told to end."""
    if row.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: row.cores])
    import kdist

    kdist.init(cpu_devices=row.devices)
    import tensorflow as tf

    model, x, y = gpt(row) if row.gpt else mlp(row)

    def step() -> float:
        start = time.perf_counter()
        model.train_on_batch(x, y)
        return time.perf_counter() - start

    first = step()
    step()
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    step()
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
    answer(first_s=first, memory_mb=peak / 2**20)
    for _ in sys.stdin:
        answer(step_s=min(step() for _ in range(STEPS)))


def mlp(row: Row) -> tuple[Any, Any, Any]:
    """The compiled MLP, inputs and targets."""
    import kdist

    import keras
    import tensorflow as tf

    x = inputs = keras.Input((WIDTH,))
    for i in range(LAYERS):
        x = keras.layers.Dense(WIDTH, "relu", name=f"layer{i}")(x)
    model = keras.Model(inputs, x)
    if row.stages:
        kdist.PipelineModel(model, row.stages, row.micro_batches, row.schedule)
    model.compile("sgd", "mse")
    data = tf.random.stateless_normal((BATCH, WIDTH), [0, 1])
    return model, data, data


def gpt(row: Row) -> tuple[Any, Any, Any]:
    """The compiled GPT of the examples, tokens and targets."""
    import kdist

    import keras
    import tensorflow as tf

    import benchmark_paths  # noqa: F401
    import gpt_model

    model = gpt_model.build(gpt_model.GPTSizes(256, GPT_LENGTH, 256, 4, 4))
    if row.stages:
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(pipe=row.stages, data=row.data, model=row.model),
            layout_map=gpt_model.layout_map(),
            pipeline=kdist.PipelineConfig(micro_batches=row.micro_batches, schedule=row.schedule),
        )
        model = kdist.parallelize(model, config)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    shape = (GPT_BATCH, GPT_LENGTH)
    tokens, targets = (
        tf.random.stateless_uniform(shape, [seed, 1], 0, 256, tf.int32) for seed in (0, 1)
    )
    return model, tokens, targets


def answer(**record: Any) -> None:
    """Sends a record to the parent."""
    print(MARK + json.dumps(record), flush=True)


class Worker:
    """The process of one row."""

    def __init__(self, row: Row) -> None:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
        self.row = row
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--row", json.dumps(dataclasses.asdict(row))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.record = self._read()

    def measure(self) -> None:
        """One round."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        found = self._read()["step_s"]
        self.record["step_s"] = min(found, self.record.get("step_s", found))

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError(f"The row ended early. Received: {self.row}")

    def end(self) -> None:
        """Lets the process finish."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bars(found: dict[str, dict[str, float]]) -> list[tuple[str, float, str]]:
    """What is asked for: name, measured, bar."""
    from kdist.pipeline import live_formula

    one, core = found["one device"]["step_s"], found["one device, one core"]["step_s"]
    four, gpipe = found["4 stages, 8 micro-batches"], found["4 stages, 8 micro-batches, gpipe"]
    live = live_formula("1f1b", 4, 8) or ()
    formula = 8 * 4 / sum(live)
    memory = gpipe["memory_mb"] / four["memory_mb"]
    return [
        ("4 stages against one device, both cores: time", four["step_s"] / one, "<= 1.1"),
        (
            "2 stages on 2 cores against one device on one: speed",
            core / found["2 stages, 8 micro-batches"]["step_s"],
            ">= 1.6",
        ),
        (
            "first step of 4 stages, 16 micro-batches, s",
            found["4 stages, 16 micro-batches"]["first_s"],
            "<= 5",
        ),
        (
            "GPT at pipe 2 x data 2 x model 2 against one device: time",
            found["GPT, pipe 2 x data 2 x model 2"]["step_s"] / found["GPT, one device"]["step_s"],
            "<= 1.4",
        ),
        ("peak memory of gpipe over 1f1b", memory, f"activations alone: {formula:.2f}"),
    ]


def main(arguments: list[str]) -> None:
    """Runs all rows, or one as a worker."""
    options = flags.FLAGS
    if options.row:
        work(Row(**json.loads(options.row)))
        return
    workers = [Worker(row) for row in ROWS]
    for _ in range(options.rounds):
        for worker in workers:
            worker.measure()
    for worker in workers:
        worker.end()
    found = {worker.row.name: worker.record for worker in workers}
    table = Table(title=f"MLP {LAYERS} x {WIDTH}, batch {BATCH}, {os.cpu_count()} cores, best of")
    for title in ("row", "first step", "step", "memory"):
        table.add_column(title, justify="left" if title == "row" else "right")
    for name, record in found.items():
        table.add_row(
            name,
            f"{record['first_s']:.2f} s",
            f"{record['step_s'] * 1e3:.0f} ms",
            f"{record['memory_mb']:.0f} MB",
        )
    console = Console()
    console.print(table)
    results = bars(found)
    for name, value, bar in results:
        console.print(f"{name}: {value:.2f} (bar {bar})")
    if options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": found, "bars": results}, indent=1))


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 5, "Rounds through all rows.")
    flags.DEFINE_string("json", "", "File for the results.")
    flags.DEFINE_string("row", "", "For the program's own use: the row to run.")
    app.run(main)
