"""Measures pipelines against one device, on one machine.

    python benchmarks/pipeline.py [--rounds 5] [--keep]

Every row is a process of its own, with TensorFlow's threads as Keras's users have them; the rounds
go through all of them in turn, and medians are shown. The first step includes tracing. "Memory" is
the peak of a step beyond what is there between steps, taken in a further process: TensorFlow counts
bytes only while oneDNN is on, which it is not by itself on every processor. With --keep the results
are those that are tracked: see results_file.py.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import results_file
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


def work(row: Row, memory: bool) -> None:
    """Runs one row: answers its memory, or the first step and the times of steps until told to end.

    Args:
        row: The row.
        memory: Whether memory is asked for.
    """
    if row.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: row.cores])
    if row.stages:
        import kdist

        kdist.init(cpu_devices=row.devices)
    model, x, y = gpt(row) if row.gpt else mlp(row)

    def step() -> float:
        start = time.perf_counter()
        model.train_on_batch(x, y)
        return time.perf_counter() - start

    first = step()
    step()
    if memory:
        answer(memory_mb=peak_of(step) / 2**20)
        return
    answer(first_s=first)
    for _ in sys.stdin:
        answer(step_s=[step() for _ in range(STEPS)])


def peak_of(step: Callable[[], Any]) -> int:
    """Bytes that a step takes beyond what is there between steps; oneDNN must be on."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    step()
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"]) - before


def mlp(row: Row) -> tuple[Any, Any, Any]:
    """The compiled MLP, inputs and targets."""
    import keras
    import tensorflow as tf

    x = inputs = keras.Input((WIDTH,))
    for i in range(LAYERS):
        x = keras.layers.Dense(WIDTH, "relu", name=f"layer{i}")(x)
    model = keras.Model(inputs, x)
    if row.stages:
        import kdist

        kdist.PipelineModel(model, row.stages, row.micro_batches, row.schedule)
    model.compile("sgd", "mse")
    data = tf.random.stateless_normal((BATCH, WIDTH), [0, 1])
    return model, data, data


def gpt(row: Row) -> tuple[Any, Any, Any]:
    """The compiled GPT of the examples, tokens and targets."""
    import keras
    import tensorflow as tf

    import benchmark_paths  # noqa: F401
    import gpt_model

    model = gpt_model.build(gpt_model.GPTSizes(256, GPT_LENGTH, 256, 4, 4))
    if row.stages:
        import kdist

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
    """The process of one row.

    Args:
        row: The row.
        memory: Whether its memory is measured, instead of its times.

    Attributes:
        first: What the process answered first.
        times: Seconds of each measured step.
    """

    def __init__(self, row: Row, memory: bool = False) -> None:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        if memory:
            environment["TF_ENABLE_ONEDNN_OPTS"] = "1"
        self.row = row
        self.times: list[float] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        command = [sys.executable, __file__, "--row", json.dumps(dataclasses.asdict(row))]
        self.process = subprocess.Popen(
            [*command, "--memory"] if memory else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.first = self._read()

    def measure(self) -> None:
        """One round."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        self.times += self._read()["step_s"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        self._errors.seek(0)
        raise RuntimeError(
            f"The row ended early. Received: {self.row}\n{self._errors.read()[-2000:]}"
        )

    def end(self) -> None:
        """Lets the process finish."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bars(found: dict[str, dict[str, Any]]) -> list[tuple[str, float, str]]:
    """What is asked for: name, measured, bar."""
    from kdist.pipeline import live_formula

    times = {name: record["step_s"]["median"] for name, record in found.items()}
    one, core = times["one device"], times["one device, one core"]
    four, gpipe = found["4 stages, 8 micro-batches"], found["4 stages, 8 micro-batches, gpipe"]
    live = live_formula("1f1b", 4, 8) or ()
    formula = 8 * 4 / sum(live)
    memory = gpipe["memory_mb"] / four["memory_mb"]
    return [
        (
            "4 stages against one device, both cores: time",
            times["4 stages, 8 micro-batches"] / one,
            "<= 1.1",
        ),
        (
            "2 stages on 2 cores against one device on one: speed",
            core / times["2 stages, 8 micro-batches"],
            ">= 1.6",
        ),
        (
            "first step of 4 stages, 16 micro-batches, s",
            found["4 stages, 16 micro-batches"]["first_s"],
            "<= 5",
        ),
        (
            "GPT at pipe 2 x data 2 x model 2 against one device: time",
            times["GPT, pipe 2 x data 2 x model 2"] / times["GPT, one device"],
            "<= 1.4",
        ),
        ("peak memory of gpipe over 1f1b", memory, f"activations alone: {formula:.2f}"),
    ]


def main(arguments: list[str]) -> None:
    """Runs all rows, or one as a worker."""
    options = flags.FLAGS
    if options.row:
        work(Row(**json.loads(options.row)), options.memory)
        return
    found = measured(options.rounds)
    title = f"MLP {LAYERS} x {WIDTH}, batch {BATCH}, {os.cpu_count()} cores, medians"
    table = Table(title=title)
    for title in ("row", "first step", "step", "memory"):
        table.add_column(title, justify="left" if title == "row" else "right")
    for name, record in found.items():
        table.add_row(
            name,
            f"{record['first_s']:.2f} s",
            f"{record['step_s']['median'] * 1e3:.0f} ms",
            f"{record['memory_mb']:.0f} MB",
        )
    console = Console()
    console.print(table)
    results = bars(found)
    for name, value, bar in results:
        console.print(f"{name}: {value:.2f} (bar {bar})")
    settings = {"rounds": options.rounds, "steps_in_a_round": STEPS}
    path = results_file.save("pipeline", settings, found, keep=options.keep, bars=results)
    console.print(f"written: {path}")


def measured(rounds: int) -> dict[str, dict[str, Any]]:
    """First step, spread of the steps and memory of every row."""
    memory = {}
    for row in ROWS:
        worker = Worker(row, memory=True)
        memory[row.name] = worker.first["memory_mb"]
        worker.end()
    workers = [Worker(row) for row in ROWS]
    for _ in range(rounds):
        for worker in workers:
            worker.measure()
    for worker in workers:
        worker.end()
    return {
        worker.row.name: {
            "first_s": worker.first["first_s"],
            "step_s": results_file.spread_of(worker.times),
            "memory_mb": memory[worker.row.name],
        }
        for worker in workers
    }


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 5, "Rounds through all rows.")
    flags.DEFINE_bool("keep", False, "Write the tracked file of results.")
    flags.DEFINE_bool("memory", False, "For the program's own use: measure memory.")
    flags.DEFINE_string("row", "", "For the program's own use: the row to run.")
    app.run(main)
