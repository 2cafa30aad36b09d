"""What processes agree on before they start."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Mapping
from typing import Any

from kdist._compat import cluster_runtime
from kdist._compat.version import VERSION
from kdist.cluster.held import FUNCTIONS, HandedArrays

import keras
import tensorflow as tf

FOLLOW = "settings.follow"


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds after which a process that is waited for has failed.

    Attributes:
        start: Until all processes are there.
        silence: Without a sign of life of one.
    """

    start: float = 300.0
    silence: float = 20.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 1:
                raise ValueError(
                    "A deadline is a finite number of seconds, at least 1. "
                    f"Received: {name}={value!r}"
                )

    @property
    def beat(self) -> float:
        """Seconds between two signs of life."""
        return min(1.0, self.silence / 5)

    @property
    def silent(self) -> str:
        """What has happened to a process that was silent for too long."""
        return f"gave no sign of life for {self.silence:g} s"


def described(threads_per_op: int | None) -> dict[str, Any]:
    """What must be the same in all processes."""
    devices = cluster_runtime.device_counts()
    return {
        "kdist": VERSION,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "cpu_devices": devices.get("CPU", 0),
        "gpus": devices.get("GPU", 0),
        "threads_per_op": threads_per_op,
    }


def first_difference(mine: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> str:
    """The first setting in which processes differ from process 0, and which; "" for none."""
    for name, value in mine.items():
        found: dict[Any, list[int]] = {}
        for process, other in sorted(others.items()):
            if other.get(name) != value:
                found.setdefault(other.get(name), []).append(process)
        if found:
            theirs = "; ".join(f"{v!r} in process {_listed(p)}" for v, p in found.items())
            return f"{name} is {value!r} in process 0, {theirs}"
    return ""


def _listed(processes: list[int]) -> str:
    return ", ".join(map(str, processes))


def _follow(held: HandedArrays | None, **said: bool) -> None:
    """Has this process's kernels work as process 0's do."""
    cluster_runtime.set_kernels(**said)


FUNCTIONS[FOLLOW] = _follow
