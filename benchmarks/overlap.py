"""Shows when gradients are summed over the replicas: in a profile of one training step.

    python benchmarks/overlap.py [--picture overlap.png]

For each row, how many of the sums have started when the last operation of a backward pass ends, and
what share of their time lies before that; of two steps in one graph, how many of the first one's
new values are written when the second one's forward pass has begun. The picture has the times of
forward, backward, sums and the optimizer's writes. Every row is a process of its own.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import results_file
from absl import app, flags
from rich.console import Console
from rich.table import Table

MARK = "@overlap "
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        name: How it is shown.
        level: Level of optimizer parallelism.
        overlap: See `kdist.FusionConfig`.
        processes: That share the devices; the profile is of the first one.
        steps: That are one graph, without a barrier between them.
    """

    name: str
    level: int = 0
    overlap: bool = True
    processes: int = 1
    steps: int = 1


ROWS = (
    Row("level 0, overlap=False", overlap=False),
    Row("level 0"),
    Row("level 1", level=1),
    Row("level 2", level=2),
    Row("level 0, 2 processes", processes=2),
    Row("level 0, 2 steps in one graph", steps=2),
    Row("level 3, 2 steps in one graph", level=3, steps=2),
)
COLUMNS = {
    "sums": "sums",
    "early": "before backward ends",
    "share": "of their time",
    "values": "new values",
    "late": "after the next forward begins",
}
_ROW = flags.DEFINE_string("row", "", "For the program's own use: the row to run.")
_DEVICES = flags.DEFINE_integer("devices", 4, "Replicas.", lower_bound=2)
_KEEP = flags.DEFINE_bool("keep", False, "Write the tracked file of results.")
_PICTURE = flags.DEFINE_string("picture", "", "PNG file to draw the rows into.")


def run(row: Row) -> dict[str, list[Span]]:
    """Profiles the fourth step; the spans of each kind, in seconds from its start."""
    import kdist

    kdist.init(cpu_devices=_DEVICES.value // row.processes)
    import numpy as np
    import tensorflow as tf

    import step_configurations
    import step_worker

    sizes = step_configurations.Sizes()
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=_DEVICES.value),
        fusion=kdist.FusionConfig(overlap=row.overlap),
        optimizer=kdist.OptimizerConfig(level=row.level),
    )
    model = kdist.parallelize(step_worker.build(sizes), config)
    step_worker.compile_model(model)
    model.steps_per_execution = model.unrolled_steps_per_execution = row.steps
    x, y = (np.concatenate([one] * row.steps) for one in step_worker.batch_of(sizes))

    def step() -> None:
        model.fit(x, y, batch_size=sizes.batch, shuffle=False, verbose=0)

    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        step()
        tf.profiler.experimental.stop()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return spans(file.read_bytes())


def spans(profile: bytes) -> dict[str, list[Span]]:
    """Reads a profile's operations: forward, backward, reduce, update."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(profile)
    found: dict[str, list[Span]] = {k: [] for k in ("forward", "backward", "reduce", "update")}
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if kind := kind_of(name):
                    start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                    found[kind].append((start, start + event.duration_ps * 1e-12))
    first = min(start for each in found.values() for start, _ in each)
    return {k: sorted((a - first, b - first) for a, b in each) for k, each in found.items()}


def kind_of(event: str) -> str | None:
    """What an operation of the step is, by its name "scope/name:Type"; None for others."""
    name, colon, operation = event.rpartition(":")
    if not colon:
        return None
    if "gradient_tape" in name:
        return "backward"
    if "/reduce" in f"/{name.removeprefix('tf.')}":
        return "reduce"
    if operation.startswith("Assign"):
        return "update"
    return "forward" if "block_" in name or "head" in name else None


def summary(found: dict[str, list[Span]], steps: int) -> dict[str, Any]:
    """Of one step, what of the sums is hidden; of two, which new values are.

    Returns:
        `sums`, the number of sums; `early`, how many started before the backward pass ended; and
        `share`, which part of their time was before it. Of two steps, `values`, which the first one
        writes, and `late`, how many of these after the next forward pass began.
    """
    if steps == 1:
        end = max(stop for _, stop in found["backward"])
        early = sum(start < end for start, _ in found["reduce"])
        total = sum(stop - start for start, stop in found["reduce"])
        before = sum(min(stop, end) - start for start, stop in found["reduce"] if start < end)
        return {"sums": len(found["reduce"]), "early": early, "share": before / total}
    # What the second step writes needs all that the first one wrote.
    values = found["update"][: len(found["update"]) // 2]
    begins, _ = found["forward"][len(found["forward"]) // 2]
    return {"values": len(values), "late": sum(start > begins for start, _ in values)}


def cell(row: dict[str, Any], column: str) -> str:
    """A result as text."""
    if column not in row:
        return ""
    return f"{row[column]:.0%}" if column == "share" else str(row[column])


def draw(results: dict[str, dict[str, list[Span]]], path: str) -> None:
    """Draws the spans of all rows."""
    from kdist.display.figure import new_figure

    figure = new_figure(10, 1.6 * len(results), "the table", dpi=120, layout="constrained")
    axes = figure.subplots(len(results), sharex=True)
    colors = {"forward": "#4477aa", "backward": "#66ccee", "reduce": "#ee6677", "update": "#ccbb44"}
    for ax, (name, found) in zip(axes, results.items(), strict=True):
        for lane, (kind, color) in enumerate(reversed(colors.items())):
            bars = [(start, max(stop - start, 5e-4)) for start, stop in found[kind]]
            ax.broken_barh(bars, (lane, 0.8), color=color)
        ax.set_yticks([0.4, 1.4, 2.4, 3.4], list(reversed(colors)))
        ax.set_title(name, loc="left", fontsize=9)
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)


def measure(row: Row) -> dict[str, Any]:
    """Runs a row in a process of its own."""
    record = json.dumps(dataclasses.asdict(row))
    program = [__file__, f"--row={record}", f"--devices={_DEVICES.value}"]
    if row.processes > 1:
        program = ["-m", "kdist.launch", "--processes", str(row.processes), *program]
    command = [sys.executable, *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if MARK in line:  # after the number of the process, if there are several
            return json.loads(line.partition(MARK)[2])
    raise RuntimeError(f"{row.name}: status {done.returncode}\n{done.stderr[-2000:]}")


def main(_: list[str]) -> None:
    """Runs all rows, or the one that the parent names."""
    if _ROW.value:
        print(MARK + json.dumps(run(Row(**json.loads(_ROW.value)))), flush=True)
        return
    console = Console()
    table = Table(title=f"what one step hides, {_DEVICES.value} replicas")
    for column in ("row", *COLUMNS.values()):
        table.add_column(column, justify="left" if column == "row" else "right")
    results, rows = {}, {}
    for row in ROWS:
        with console.status(row.name):
            results[row.name] = measure(row)
        rows[row.name] = one = summary(results[row.name], row.steps)
        table.add_row(row.name, *(cell(one, column) for column in COLUMNS))
    console.print(table)
    settings = {"devices": _DEVICES.value}
    path = results_file.save("overlap", settings, rows, keep=_KEEP.value)
    console.print(f"written: {path}")
    if _PICTURE.value:
        draw(results, _PICTURE.value)
        console.print(f"drawn: {_PICTURE.value}")


if __name__ == "__main__":
    app.run(main)
