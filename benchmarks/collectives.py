"""How far the cost model is off in one process: predicted and measured times of collectives.

    sh run.sh python benchmarks/collectives.py --keep

The model is calibrated by copies, additions and transfers; the collectives that it then predicts
are not among them. Calibration and collectives take turns, round by round, and medians of rounds
are compared: what else the machine does meanwhile meets all of them.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from typing import Any

import kdist
from kdist.comm import Group, calibration
from kdist.comm.host import HostCost, HostWork
from kdist.comm.measure import Measurement, measure

import results_file
from absl import app, flags

FLAGS = flags.FLAGS
LARGE = 1 << 24
flags.DEFINE_integer("devices", 8, "logical CPU devices", 2)
flags.DEFINE_integer("rounds", 5, "times that everything is measured", 1)
flags.DEFINE_integer("iterations", 5, "timed runs of a collective in a round", 1)
flags.DEFINE_bool("keep", False, "write the tracked file of results")
flags.DEFINE_list(
    "operations",
    ["broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"],
    "collectives",
)
flags.DEFINE_list("algorithms", ["direct", "ring", "tree"], "their algorithms")
flags.DEFINE_list("sizes", [str(1 << n) for n in (10, 13, 16, 19, 22, 24, 26)], "bytes")


def measured() -> tuple[list[list[tuple[HostWork, float]]], list[list[Measurement]]]:
    """Calibration programs, and collectives, of each round."""
    group = Group.of(kdist.mesh(data=FLAGS.devices), "data")
    calibrated, collectives = [], []
    for number in range(FLAGS.rounds):
        calibrated.append(calibration.timed_work(group, iterations=FLAGS.iterations))
        collectives.append(
            [
                one_of(group, operation, algorithm, int(size))
                for size in FLAGS.sizes
                for operation in FLAGS.operations
                for algorithm in FLAGS.algorithms
            ]
        )
        print(f"round {number + 1} of {FLAGS.rounds}", flush=True)
    return calibrated, collectives


def one_of(group: Group, operation: str, algorithm: str, size: int) -> Measurement:
    """One measurement; a gigabyte that the one before took is given back."""
    if size >= LARGE:
        gc.collect()
    return measure(operation, algorithm, size, group, iterations=FLAGS.iterations)


def predicted(link: HostCost, rounds: list[list[Measurement]]) -> list[dict[str, Any]]:
    """One row per collective: its median time, and what the model says."""
    rows = []
    for same in zip(*rounds):
        seconds = [found.seconds for found in same]
        median = dataclasses.replace(same[0], seconds=statistics.median(seconds))
        rows.append(
            {
                "operation": median.operation,
                "algorithm": median.algorithm,
                "nbytes": median.nbytes,
                "wrong": sum(found.wrong for found in same),
                "seconds": results_file.spread_of(seconds),
                "error": calibration.error(median, link),
            }
        )
    return rows


def main(_: list[str]) -> None:
    """Prints the median error, by size and in all."""
    kdist.init(cpu_devices=FLAGS.devices)
    calibrated, collectives = measured()
    work = [(same[0][0], statistics.median(s for _, s in same)) for same in zip(*calibrated)]
    link = calibration.fit_host(work, FLAGS.devices)
    rows = predicted(link, collectives)
    print(link)
    for row in rows:
        print(
            f"{row['operation']:<15}{row['algorithm']:<8}{row['nbytes']:>9} "
            f"{row['seconds']['median'] * 1e6:>9.0f} us {row['error']:+.0%}"
        )
    errors = [abs(row["error"]) for row in rows]
    print(f"median error {statistics.median(errors):.0%}")
    names = ("devices", "rounds", "iterations")
    settings = {name: FLAGS[name].value for name in names}
    cost = dataclasses.asdict(link)
    fitted = [{**dataclasses.asdict(done), "seconds": seconds} for done, seconds in work]
    path = results_file.save(
        "collectives", settings, rows, keep=FLAGS.keep, link=cost, calibration=fitted
    )
    print(f"written: {path}")


if __name__ == "__main__":
    app.run(main)
