"""Measures training steps of the same GPT, run in different ways on one machine.

    sh run.sh bench                  plain Keras, MirroredStrategy, kdist
    sh run.sh bench --with-jax       and Keras on JAX, in an environment of its own
    sh run.sh bench --deep           and a deep small model: what a step costs beside its arithmetic
    sh run.sh bench --with-processes --only=processes    one mesh in one and in several processes

Each configuration is a process of its own and stays alive; the rounds go through all of them in
turn (A B C A B C), so what slows the machine for a while slows every row. The column
"used" counts the devices that computed: a time for a mesh of four of which two compute is
not the time of that mesh. Shown are medians: they
compare rows of one run, and say nothing about another machine. Results are kept with
--keep: see results_file.py.
"""

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import IO, Any

import results_file
from absl import flags
from rich.console import Console

import step_configurations as rows
from step_worker import MARK

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
console = Console(stderr=True)


class Worker:
    """A process that runs one configuration; see `step_worker.py`."""

    def __init__(self, configuration: rows.Configuration, python: str, *options: str):
        self.configuration = configuration
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - see close()
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
        record = json.dumps(dataclasses.asdict(configuration))
        command = [python, str(HERE / "step_worker.py"), record, *options]
        places = _places(configuration.processes)
        self.others: list[subprocess.Popen] = [
            subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment | one)
            for one in places[1:]
        ]
        environment |= places[0]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.first = self._answer()

    def steps(self, count: int) -> list[float]:
        """Runs steps; returns the seconds of each."""
        assert self.process.stdin is not None
        print(count, file=self.process.stdin, flush=True)
        return self._answer()["steps_s"]

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        follow = self.configuration.runner == "kdist"
        for process in (self.process, *self.others):
            try:
                process.wait(timeout=20 if follow or process is self.process else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        code = self.process.wait()
        self.log.seek(0)
        tail = self.log.read().decode(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError(
            f"{self.configuration.name}: the process ended with status {code}\n" + "\n".join(tail)
        )


def _places(processes: int) -> list[dict[str, str]]:
    """Variables by which each process of a program finds the others; empty for one that is alone.

    kdist reads its own, other systems' runners `BENCH_*`.
    """
    if processes == 1:
        return [{}]
    addresses = []
    with contextlib.ExitStack() as free:
        for _ in range(processes):
            one = free.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{one.getsockname()[1]}")
    common = {
        "KDIST_COORDINATOR": addresses[0],
        "KDIST_NUM_PROCESSES": str(processes),
        "BENCH_ADDRESSES": ",".join(addresses),
    }
    return [common | {"KDIST_PROCESS_ID": str(k), "BENCH_RANK": str(k)} for k in range(processes)]


def measure(
    configurations: Sequence[rows.Configuration],
    pythons: dict[str, str],
    rounds: int,
    steps: int,
    together: bool = False,
) -> list[dict[str, Any]]:
    """Runs configurations in interleaved rounds.

    A configuration that fails is reported and left out of the rounds; the others go on. With
    `together` all start at once: sooner done, and first steps are not to be compared.

    Returns:
        A record for each configuration: `name`, `first_step_s`, `setup_s`, `steps_s` (all rounds),
        or `error`.
    """
    records: list[dict[str, Any]] = [dataclasses.asdict(row) for row in configurations]
    workers: list[tuple[dict[str, Any], Worker]] = []
    try:
        with futures.ThreadPoolExecutor(max(1, len(records)) if together else 1) as pool:
            pythons_of = [pythons.get(row.runner, sys.executable) for row in configurations]
            started = pool.map(_started, configurations, pythons_of)
            for record, worker in zip(records, started, strict=True):
                if isinstance(worker, str):
                    record["error"] = worker
                    continue
                record |= worker.first | {"steps_s": []}
                workers.append((record, worker))
        for index in range(rounds):
            for record, worker in workers:
                with console.status(f"round {index + 1} of {rounds}: {record['name']}"):
                    record["steps_s"] += worker.steps(steps)
    finally:
        for _, worker in workers:
            worker.close()
    return records


def _started(row: rows.Configuration, python: str) -> Worker | str:
    """A worker that has done its first step, or why it has not."""
    console.print(f"{row.name}: starts")
    try:
        worker = Worker(row, python)
    except RuntimeError as error:
        console.print(f"[red]{row.name}: failed[/red]\n{error}", highlight=False)
        return str(error)
    console.print(f"{row.name}: first step {worker.first['first_step_s']:.1f} s")
    return worker


def add_devices(
    records: list[dict[str, Any]], configurations: Sequence[rows.Configuration]
) -> None:
    """Adds to each TensorFlow row `devices`: the numbers of those that computed."""
    for record, row in zip(records, configurations, strict=True):
        if row.runner not in ("plain", "mirrored", "kdist") or "error" in record:
            continue
        with console.status(f"{row.name}: which devices compute"):
            try:
                worker = Worker(row, sys.executable, "--devices")
            except RuntimeError as error:
                record["error"] = str(error)
                console.print(f"[red]{row.name}: failed[/red]\n{error}", highlight=False)
                continue
            record |= worker.first
            worker.close()


def computing(record: dict[str, Any]) -> str:
    """Says how many of a row's devices compute, such as `"2 of 4"`; `"?"` where nobody looked."""
    total = 1
    for _, size in record["axes"]:
        total *= size
    return f"{len(record['devices'])} of {total}" if "devices" in record else "?"


def python_with(package: str, folder: Path) -> str:
    """Returns the Python of an environment with Keras on another backend, made if need be.

    Args:
        package: The backend's.
        folder: Of the environment.
    """
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        with console.status(f"installing {package} into {folder}"):
            venv.create(folder, with_pip=True, clear=True)
            constraints = ["--constraint", str(CHECKOUT / "constraints.txt")]
            packages = [package, "keras", "numpy"]
            subprocess.run(
                [str(python), "-m", "pip", "install", "--quiet", *constraints, *packages],
                check=True,
            )
        done.touch()
    return str(python)


def step_rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table of step times; ratios are to the plain row of the same model."""
    found: list[tuple[str, ...]] = []
    base = float("nan")
    for record in records:
        if record["runner"] == "plain" and record.get("steps_s"):
            base = statistics.median(record["steps_s"])  # of the rows that follow it
        if "error" in record:
            found.append((record["name"], "", "failed", "", "", "", ""))
            continue
        step = statistics.median(record["steps_s"]) if record["steps_s"] else float("nan")
        cells = (
            computing(record),
            f"{record['first_step_s']:.1f}",
            f"{step:.3f}",
            f"{step / base:.2f}",
            f"{record['peak_mib']:.0f}",
        )
        losses = f"{record['first_loss']:.4f} {record['second_loss']:.4f}"
        found.append((record["name"], *cells, losses))
    return found


def growth_rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table of first-step times."""
    found: list[tuple[str, ...]] = []
    for record in records:
        first, most = record.get("first_step_s"), record.get("peak_mib", 0)
        found.append((record["name"], "failed" if first is None else f"{first:.1f}", f"{most:.0f}"))
    return found


def show(steps: list[dict[str, Any]], growth: list[dict[str, Any]]) -> None:
    """Prints both tables."""
    # Here, since kdist sets variables for its process that workers would inherit.
    from kdist.display.tables import Column, number, table

    shown, name = Console(), Column("configuration")
    titles = ("used", "first, s", "step, s", "to plain", "MiB", "losses")
    title = "training step, same model and global batch"
    shown.print(table(title, [name, *map(number, titles)], step_rows(steps), shown.width))
    if growth:
        title = "first step (tracing and compiling included)"
        columns = [name, number("first step, s"), number("MiB")]
        shown.print(table(title, columns, growth_rows(growth), shown.width))


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    default = rows.Sizes()
    flags.DEFINE_integer("rounds", 5, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "steps", 3, "steps of a configuration in a round", lower_bound=1, flag_values=values
    )
    flags.DEFINE_bool("with_jax", False, "add the rows of Keras on JAX", flag_values=values)
    flags.DEFINE_bool("deep", False, "add rows of a deep small model", flag_values=values)
    flags.DEFINE_bool(
        "with_processes", False, "add the rows of several processes", flag_values=values
    )
    flags.DEFINE_bool(
        "with_torch", False, "add those of torch's, with --with-processes", flag_values=values
    )
    flags.DEFINE_string(
        "torch_venv", str(CHECKOUT / ".venv-torch"), "torch's environment", flag_values=values
    )
    flags.DEFINE_string(
        "jax_venv", str(CHECKOUT / ".venv-jax"), "JAX's environment", flag_values=values
    )
    flags.DEFINE_bool("growth", True, "measure how the first step grows", flag_values=values)
    flags.DEFINE_string(
        "only", "", "run rows whose name has this text, and plain", flag_values=values
    )
    flags.DEFINE_string("out", "", "JSON file to write", flag_values=values)
    flags.DEFINE_bool("keep", False, "write the tracked file of results", flag_values=values)
    for field in dataclasses.fields(rows.Sizes):
        value = getattr(default, field.name)
        flags.DEFINE_integer(field.name, value, "size", lower_bound=1, flag_values=values)
    return values


def main(argv: Sequence[str]) -> dict[str, Any]:
    """Runs the benchmark; returns what the JSON file holds."""
    args = _flags()
    # Dashes are accepted for underscores, as in --with-jax.
    argv = [a if not a.startswith("--") else _underscored(a) for a in argv]
    if {"--help", "-h"} & set(argv):
        print(f"{__doc__}\nFlags:{args.get_help()}")
        return {}
    args(argv)
    chosen_sizes: dict[str, Any] = {
        field.name: args[field.name].value for field in dataclasses.fields(rows.Sizes)
    }
    sizes = rows.Sizes(**chosen_sizes)
    chosen = rows.STEP_ROWS + (rows.JAX_ROWS if args.with_jax else ())
    chosen += rows.PROCESS_ROWS if args.with_processes else ()
    chosen += rows.TORCH_ROWS if args.with_processes and args.with_torch else ()
    chosen = tuple(row for row in chosen if row is rows.PLAIN or args.only in row.name)
    chosen = tuple(dataclasses.replace(row, sizes=sizes) for row in chosen)
    if args.deep:
        chosen += tuple(dataclasses.replace(row, sizes=rows.DEEP_SMALL) for row in rows.DEEP_ROWS)
    pythons = {}
    if args.with_jax:
        pythons["jax"] = python_with("jax", Path(args.jax_venv))
    if args.with_torch:
        pythons["ddp"] = python_with("torch", Path(args.torch_venv))

    steps = measure(chosen, pythons, args.rounds, args.steps)
    add_devices(steps, chosen)
    growth: list[dict[str, Any]] = []
    if args.growth:
        for row in rows.growth_rows(sizes):
            growth += measure([row], pythons, 0, 0)
    show(steps, growth)
    for record in (*steps, *growth):
        if record.get("steps_s"):
            record["step_s"] = results_file.spread_of(record["steps_s"])
    result = {"step_rows": steps, "growth_rows": growth}
    settings = {"rounds": args.rounds, "steps_in_a_round": args.steps, **chosen_sizes}
    name = "processes" if args.with_processes else "step_time"
    path = results_file.save(name, settings, result, keep=args.keep, out=args.out)
    console.print(f"written: {path}")
    return result


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


if __name__ == "__main__":
    results = main(sys.argv)
    sys.exit(
        any("error" in r for kind in ("step_rows", "growth_rows") for r in results.get(kind, ()))
    )
