"""Table of times and bandwidths of the collectives, in the form of nccl-tests.

    python -m kdist.comm.bench --operations=all_reduce --algorithms=direct,ring --max_bytes=67108864
    python -m kdist.comm.bench --processes=2 --format=json

Columns: size of the full buffer S; time; algorithm bandwidth S / time; bus bandwidth, times
2(p - 1)/p for all_reduce, (p - 1)/p for reduce_scatter, all_gather and all_to_all, 1 for broadcast
and reduce, "-" where there is no usual factor; number of wrong values; how often numpy copies S in
that time; the time that the cost model predicts and by how much it is off. The constants of the
model are fitted in the same run.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kdist._compat import environment
from kdist.comm import calibration, membership, processes
from kdist.comm.algorithms import ALGORITHMS, OPERATIONS, check
from kdist.comm.call import AUTO, DTYPES, RUNTIME
from kdist.comm.cost import LinkCost
from kdist.comm.group import Group
from kdist.comm.measure import Measurement, copy_seconds, measure
from kdist.comm.torus import TORUS, is_torus

import keras
from absl import app, flags
from rich.console import Console
from rich.table import Table

_OPERATIONS = flags.DEFINE_list("operations", list(OPERATIONS), "Collectives to time.")
_ALGORITHMS = flags.DEFINE_list("algorithms", ["direct", "ring"], "Algorithms, or 'auto'.")
_DEVICES = flags.DEFINE_integer("devices", 8, "Logical CPU devices of all processes.", 2)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes on this machine.", 1)
_MIN = flags.DEFINE_integer("min_bytes", 1 << 10, "Smallest full buffer.", 1)
_MAX = flags.DEFINE_integer("max_bytes", 1 << 20, "Largest full buffer.", 1)
_FACTOR = flags.DEFINE_integer("factor", 32, "From a size to the next.", 2)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", DTYPES, "Dtype of the values; the model's is float32."
)
_ITERATIONS = flags.DEFINE_integer("iterations", 5, "Timed runs; the median counts.", 1)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "Form of the answer.")
_INDEX = flags.DEFINE_integer("index", None, "Set by the first process: number of this one.")
_ADDRESSES = flags.DEFINE_list("addresses", None, "Set by the first process: all addresses.")


_KNOWN = (*ALGORITHMS, AUTO, RUNTIME)
flags.register_validator(
    "operations", lambda names: set(names) <= set(OPERATIONS), f"Any of {', '.join(OPERATIONS)}."
)
flags.register_validator(
    "algorithms",
    lambda names: all(name in _KNOWN or is_torus(name) for name in names),
    f"Any of {', '.join(_KNOWN)}, torus, torus:AxB.",
)


def check_flags(arguments: Sequence[str]) -> None:
    """Refuses, before anything starts, what could not be measured.

    Args:
        arguments: The command line's without its flags: the program alone.
    """
    if len(arguments) > 1:
        raise ValueError(
            "The benchmark takes flags alone; lists have commas and no blanks. "
            f"Received: {' '.join(arguments[1:])}"
        )
    if _DEVICES.value % _PROCESSES.value:
        raise ValueError(
            "Every process has as many devices. "
            f"Received: devices={_DEVICES.value}, processes={_PROCESSES.value}"
        )
    if (_INDEX.value is None) != (_ADDRESSES.value is None):
        raise ValueError(
            "index and addresses are set by the first process; give --processes=2. "
            f"Received: index={_INDEX.value}, addresses={_ADDRESSES.value}"
        )
    sizes(_MIN.value, _MAX.value, _FACTOR.value)
    for operation in _OPERATIONS.value:
        for algorithm in _ALGORITHMS.value:
            if algorithm == RUNTIME and (operation != "all_reduce" or _PROCESSES.value == 1):
                raise ValueError(
                    "'runtime' is TensorFlow's own all-reduce across processes. Received: "
                    f"algorithm='runtime', operation={operation!r}, processes={_PROCESSES.value}"
                )
            if algorithm not in (AUTO, RUNTIME):
                check(operation, algorithm, _DEVICES.value)


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """Sizes from the smallest on, each `factor` times the one before, and the largest.

    Raises:
        ValueError: If the largest is smaller than the smallest.
    """
    if largest < smallest:
        raise ValueError(
            "The largest buffer is not smaller than the smallest. "
            f"Received: min_bytes={smallest}, max_bytes={largest}"
        )
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= factor
    return [*found, largest]


def records(
    measurements: Sequence[Measurement], link: LinkCost, copies: dict[int, float]
) -> list[dict[str, Any]]:
    """The rows of the table, as plain data.

    Args:
        measurements: One per row.
        link: Constants of the cost model.
        copies: Seconds of a numpy copy for each size in bytes.
    """
    rows = []
    for found in measurements:
        # The sides of a torus that names none follow from the processes.
        known = found.algorithm not in (AUTO, RUNTIME, TORUS)
        error = calibration.error(found, link) if known else None
        rows.append(
            dataclasses.asdict(found)
            | {
                "algorithm_bandwidth": found.algorithm_bandwidth,
                "bus_bandwidth": found.bus_bandwidth,
                "numpy_copies": found.seconds / copies[found.nbytes],
                "predicted_seconds": None if error is None else (1 + error) * found.seconds,
                "prediction_error": error,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The rows as a table for people."""
    result = Table(title=title)
    for name in ("operation", "algorithm"):
        result.add_column(name)
    right = ("bytes", "time us", "algbw GB/s", "busbw GB/s", "wrong", "x copy", "model us", "error")
    for name in right:
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(
            row["operation"],
            row["algorithm"],
            str(row["nbytes"]),
            f"{row['seconds'] * 1e6:.0f}",
            _number(row["algorithm_bandwidth"], 1e-9, ".3f"),
            _number(row["bus_bandwidth"], 1e-9, ".3f"),
            "-" if row["wrong"] is None else str(row["wrong"]),
            _number(row["numpy_copies"], 1, ".1f"),
            _number(row["predicted_seconds"], 1e6, ".0f"),
            _number(row["prediction_error"], 1, "+.0%"),
        )
    return result


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value * unit, form)


def main(arguments: list[str]) -> None:
    """Runs the benchmark; of several processes, starts the others."""
    check_flags(arguments)
    addresses, index = _ADDRESSES.value, _INDEX.value
    if _PROCESSES.value == 1:
        environment.set_up_devices(cpu_devices=_DEVICES.value)
        show(_group([f"cpu:{device}" for device in range(_DEVICES.value)]))
    elif addresses is not None and index is not None:
        show(_join(addresses, index))
    else:
        _start(_PROCESSES.value)


def _group(names: Sequence[str]) -> Group:
    return Group.of(keras.distribution.DeviceMesh((len(names),), ["data"], names), "data")


def _join(addresses: Sequence[str], index: int) -> Group:
    each = _DEVICES.value // len(addresses)
    environment.set_up_devices(cpu_devices=each)
    membership.connect(addresses, index)
    names = [
        f"/job:{processes.JOB}/task:{task}/device:CPU:{device}"
        for task in range(len(addresses))
        for device in range(each)
    ]
    return _group(names)


def _start(count: int) -> None:
    """Starts all processes; the first one prints."""
    addresses = ",".join(processes.local_addresses(count))
    command = [sys.executable, "-m", "kdist.comm.bench", *sys.argv[1:], f"--addresses={addresses}"]
    members = [subprocess.Popen([*command, f"--index={index}"]) for index in range(count)]
    try:
        codes = [member.wait() for member in members]
    finally:
        for member in members:
            member.kill()
    if any(codes):
        sys.exit(f"A process failed. Received: exit codes={codes}")


def show(group: Group) -> None:
    """Measures over a group and prints, in the first process."""
    link = calibration.calibrate(group, iterations=_ITERATIONS.value)
    found = [
        measure(operation, algorithm, size, group, _DTYPE.value, _ITERATIONS.value)
        for operation in _OPERATIONS.value
        for algorithm in _ALGORITHMS.value
        for size in sizes(_MIN.value, _MAX.value, _FACTOR.value)
    ]
    if _INDEX.value:
        return
    copies = {
        size: copy_seconds(size, _ITERATIONS.value) for size in sorted({f.nbytes for f in found})
    }
    rows = records(found, link, copies)
    copied = [_copy_row(size, seconds) for size, seconds in copies.items()]
    if _FORMAT.value == "json":
        document = {
            "devices": group.size,
            "processes": _PROCESSES.value,
            "dtype": _DTYPE.value,
            "link": dataclasses.asdict(link),
            "rows": rows + copied,
        }
        print(json.dumps(document, indent=1))
        return
    title = f"{group.size} devices, {_PROCESSES.value} process(es), {_DTYPE.value}; {link}"
    Console(width=None if sys.stdout.isatty() else 120).print(table([*rows, *copied], title))


def _copy_row(nbytes: int, seconds: float) -> dict[str, Any]:
    empty = dict.fromkeys(
        ("bus_bandwidth", "wrong", "predicted_seconds", "prediction_error", "devices")
    )
    return empty | {
        "operation": "numpy copy",
        "algorithm": "-",
        "nbytes": nbytes,
        "seconds": seconds,
        "algorithm_bandwidth": nbytes / seconds,
        "numpy_copies": 1.0,
    }


if __name__ == "__main__":
    app.run(main)
