"""The tables of docs that show kept results, made from `benchmarks/results/*.json`.

    sh run.sh python benchmarks/results_tables.py

writes them anew, each between `<!-- results: NAME -->` and `<!-- end of results -->`. A test holds
the pages to what this gives, so that no figure outlives the run it came from.
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdist.display.tables import readable

import results_file

CHECKOUT = results_file.FOLDER.parent.parent
PAGES = (
    "docs/speed.md",
    "docs/gpus.md",
    "docs/memory.md",
    "docs/recompute.md",
    "docs/compression.md",
    "docs/pipeline.md",
    "docs/collectives.md",
    "docs/processes.md",
    "docs/tables.md",
    "docs/optimizer_parallelism.md",
    "docs/tensor_parallelism.md",
)
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.S)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def step_time(record: dict[str, Any]) -> str:
    """Steps relative to plain Keras, and first steps."""
    rows = record["rows"]["step_rows"]
    base = float("nan")
    found = []
    for row in rows:
        if row["runner"] == "plain":
            base = statistics.median(row["steps_s"])  # of the rows that follow it
        ratio = statistics.median(row["steps_s"]) / base
        found.append([row["name"], f"{ratio:.2f}", f"{row['first_step_s']:.1f} s"])
    return table(("", "step, to plain Keras", "first step"), found)


def one_gpu(record: dict[str, Any]) -> str:
    """Steps over one card and its parts, relative to plain Keras, and memory."""
    first = statistics.median(record["rows"][0]["steps_s"])
    found = []
    for row in record["rows"]:
        seconds = statistics.median(row["steps_s"])
        peaks = ", ".join(f"{one:.0f}" for one in row["gpu_peak_mib"])
        found.append([row["name"], f"{1000 * seconds:.1f} ms", f"{seconds / first:.2f}", peaks])
    return table(("", "step", "to plain Keras", "memory of each device at most, MiB"), found)


def memory_levels(record: dict[str, Any]) -> str:
    """Bytes per parameter, by level."""
    n = record["settings"]["data"]
    columns = ("weights", "state", "gradients", "gathered", "both", "sum")
    rows = [
        [str(row["level"]), f"{row['formula']:.2f}", *(f"{row[one]:.2f}" for one in columns)]
        for row in record["rows"]
    ]
    return table(("level", f"formula, N = {n}", *columns), rows)


def compression(record: dict[str, Any]) -> str:
    """What is sent and kept, and the loss, by what is compressed."""
    first = record["rows"][0]
    rows = []
    for row in record["rows"]:
        less = first["sent"] / row["sent"]
        worse = row["loss"] / first["loss"] - 1
        rows.append(
            [
                row["name"],
                readable(row["sent"]) + (f" ({less:.1f} x less)" if less > 1.05 else ""),
                readable(row["moments"]),
                readable(row["kept"]) if row["kept"] else "",
                f"{row['loss']:.4f}" + (f" ({worse:+.2%})" if abs(worse) >= 5e-5 else ""),
            ]
        )
    return table(("compressed", "sent in a step", "moments", "errors kept", "loss"), rows)


def pipeline(record: dict[str, Any]) -> str:
    """Ratios that the benchmark has bars for."""
    rows = [[name, f"{value:.2f}", str(bar)] for name, value, bar in record["bars"]]
    return table(("", "measured", "bar"), rows)


def collectives(record: dict[str, Any]) -> str:
    """How far predictions are off, by size of the buffer, and over all sizes."""
    groups: dict[str, list[float]] = {}
    for row in record["rows"]:
        groups.setdefault(readable(row["nbytes"]), []).append(row["error"])
    groups["all"] = [error for errors in groups.values() for error in errors]
    rows = [
        [
            size,
            f"{statistics.median(map(abs, errors)):.0%}",
            f"{statistics.mean(abs(e) <= 0.3 for e in errors):.0%}",
            f"{statistics.mean(0.5 <= 1 + e <= 2 for e in errors):.0%}",
        ]
        for size, errors in groups.items()
    ]
    return table(("buffer", "median error", "within 30 %", "within a factor of 2"), rows)


def reduction(record: dict[str, Any]) -> str:
    """Times of a sum over two processes, and how many times faster than TensorFlow's."""
    rows = [
        [
            row["name"],
            f"{row['seconds']['median'] * 1e3:.0f} ms",
            f"{row['faster']['median']:.1f} x",
            f"{row['faster']['min']:.1f} x to {row['faster']['max']:.1f} x",
        ]
        for row in record["rows"]
    ]
    return table(("", "time", "faster", "least and most"), rows)


def processes(record: dict[str, Any]) -> str:
    """Steps of the same mesh in one process and in several; how the first step grows."""
    rows, growth = record["rows"]["step_rows"], record["rows"]["growth_rows"]
    base = statistics.median(rows[0]["steps_s"])
    found = [
        [
            row["name"],
            f"{statistics.median(row['steps_s']) / base:.2f}",
            f"{row['first_step_s']:.1f} s",
            f"{row['peak_mib']:.0f} MiB",
        ]
        for row in rows
    ]
    header = ("", "step, to plain Keras", "first step", "memory of process 0, at most")
    grown = [
        [row["name"], f"{row['first_step_s']:.1f} s", f"{row['peak_mib']:.0f} MiB"]
        for row in growth
        if "model" not in row["name"]
    ]
    return table(header, found) + "\n" + table(("one process", "first step", "memory"), grown)


def recompute(record: dict[str, Any]) -> str:
    """Activations and time of a step, by policy."""
    rows = [
        [
            row["policy"],
            readable(row["activations"]),
            f"{row['memory']:.2f}",
            f"{row['ratio']['median']:.2f}",
        ]
        for row in record["rows"]
    ]
    return table(("policy", "activations", "to none", "step, to none"), rows)


def tables(record: dict[str, Any]) -> str:
    """Steps with a large table in different places, and what is sent of it."""
    rows = [
        [
            row["optimizer"],
            row["table"],
            f"{row['by_keras']['median']:.2f}",
            *(f"{row[way]:,}" if way in row else "" for way in ("to_devices", "to_host")),
        ]
        for row in record["rows"]
    ]
    header = ("optimizer", "table", "step, to plain Keras", "bytes to devices", "bytes to the host")
    return table(header, rows)


def convolutions(record: dict[str, Any]) -> str:
    """Steps of a convolutional network on four devices, and bytes, by mesh and level."""
    base = record["rows"][0]["seconds"]["median"]
    rows = [
        [
            row["name"],
            f"{row['seconds']['median'] / base:.2f}",
            *(readable(row[one]) for one in ("kept", "activations", "inside", "outside")),
        ]
        for row in record["rows"]
    ]
    header = (
        "",
        "step, to data 4",
        "a device keeps",
        "activations",
        "given by collectives in layers",
    )
    return table((*header, "sent outside of layers"), rows)


def overlap(record: dict[str, Any]) -> str:
    """How much of the sums, and of new values, lies beside other work."""

    def cells(row: dict[str, Any]) -> list[str]:
        share = f"{row['share']:.0%}" if "share" in row else ""
        counts = {key: str(row.get(key, "")) for key in ("sums", "early", "values", "late")}
        return [counts["sums"], counts["early"], share, counts["values"], counts["late"]]

    header = ("", "sums", "before the backward pass ends", "of their time", "new values of a step")
    rows = [[name, *cells(row)] for name, row in record["rows"].items()]
    return table((*header, "written after the next forward pass began"), rows)


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step_time": step_time,
    "one_gpu": one_gpu,
    "memory_levels_data4": memory_levels,
    "memory_levels_data8": memory_levels,
    "compression": compression,
    "pipeline": pipeline,
    "collectives": collectives,
    "reduction": reduction,
    "processes": processes,
    "recompute_data2": recompute,
    "tables": tables,
    "overlap": overlap,
    "convolutions": convolutions,
}


def commit_of(record: dict[str, Any]) -> str:
    """The commit that a run was made of, and what keeps one from having it just so.

    A "+" of the record says that files differed from the commit; its `commit_note` says what else
    there is to know of it.
    """
    name = record["commit"]
    said = [name.rstrip("+")]
    said += ["with files that differed from it"] if name.endswith("+") else []
    said += [record["commit_note"]] if "commit_note" in record else []
    return said[0] + (f" ({'; '.join(said[1:])})" if said[1:] else "")


def source(record: dict[str, Any]) -> str:
    """Where and when a run was made."""
    machine, versions = record["machine"], record["versions"]
    return (
        f"\nMeasured {record['date'][:10]} at commit {commit_of(record)} on "
        f"{machine['cores']} cores of {machine['processor']}, TensorFlow {versions['tensorflow']}, "
        f"Keras {versions['keras']}: `benchmarks/results/{record['name']}.json`.\n"
    )


def with_results(text: str) -> str:
    """A page with its tables made anew from the kept results."""

    def filled(found: re.Match) -> str:
        name = found.group(2)
        record = json.loads((results_file.FOLDER / f"{name}.json").read_text())
        return f"{found.group(1)}{KINDS[name](record)}{source(record)}{found.group(3)}"

    return PLACE.sub(filled, text)


def main() -> None:
    """Writes the pages."""
    for name in PAGES:
        page = Path(CHECKOUT / name)
        before = page.read_text()
        after = with_results(before)
        page.write_text(after)
        print(f"{name}: {'written' if after != before else 'unchanged'}")


if __name__ == "__main__":
    main()
