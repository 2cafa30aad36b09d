"""Schedules by name, from a file, or as objects: `get_schedule`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kdist.pipeline import generators
from kdist.pipeline.csv_file import read_csv
from kdist.pipeline.instructions import as_index
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.validate import validate

_GENERATORS: dict[str, Callable[..., generators.Rows]] = {
    "gpipe": generators.gpipe,
    "1f1b": generators.one_f_one_b,
    "interleaved": generators.interleaved,
    "zero_bubble": generators.zero_bubble,
}
NAMES = tuple(_GENERATORS)
"""The schedules that `get_schedule` knows by name."""


def get_schedule(
    schedule: str | os.PathLike[str] | Schedule,
    *,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
) -> Schedule:
    """The schedule that a name, a file or an object stands for.

    Args:
        schedule: "gpipe" (Huang et al. 2019), "1f1b" (PipeDream-Flush, Narayanan et al. 2021),
            "interleaved" (Megatron-LM, Narayanan et al. 2021), "zero_bubble" (ZB-H1, Qi et al.
            2023), the path of a CSV file (see `kdist.pipeline.read_csv`), or a `Schedule`.
        stages: Number of stages, p.
        micro_batches: Number of micro-batches, m.
        chunks: Chunks per stage, v. None: 2 for "interleaved", what a file or an object has, and
            1 for everything else.

    Returns:
        The schedule. One that was given as a file or an object has been validated.

    Raises:
        ValueError: If a number is not a positive integer, the name is unknown, the schedule has no
            such form for these numbers, or a given one cannot run or has other numbers.

    Example:
    ```python
    from kdist.pipeline import get_schedule

    print(get_schedule("interleaved", stages=2, micro_batches=4, chunks=2))
    ```
    """
    stages, micro_batches = _count("stages", stages), _count("micro_batches", micro_batches)
    chunks = None if chunks is None else _count("chunks", chunks)
    if isinstance(schedule, str) and schedule in _GENERATORS:
        if chunks is None:
            chunks = 2 if schedule == "interleaved" else 1
        rows = _GENERATORS[schedule](stages, micro_batches, chunks)
        return Schedule(name=schedule, stages=rows)
    given = _given(schedule)
    validate(given, stages=stages, micro_batches=micro_batches, chunks=chunks)
    return given


def check_known(schedule: Any) -> None:
    """Checks that something stands for a schedule, whatever its numbers.

    Args:
        schedule: See `get_schedule`.

    Raises:
        ValueError: It is none, neither a name of one nor a file.
    """
    path = isinstance(schedule, str | os.PathLike) and os.path.isfile(schedule)
    if isinstance(schedule, Schedule) or path or schedule in NAMES:
        return
    raise ValueError(
        f"schedule is one of {', '.join(map(repr, NAMES))}, a kdist.pipeline.Schedule, or the path "
        f"of an existing CSV file. Received: schedule={schedule!r}"
    )


def _count(name: str, value: Any) -> int:
    count = as_index(value)
    if count is None or count < 1:
        raise ValueError(f"{name} is an integer from 1 on. Received: {name}={value!r}")
    return count


def _given(schedule: Any) -> Schedule:
    check_known(schedule)
    return schedule if isinstance(schedule, Schedule) else read_csv(schedule)
