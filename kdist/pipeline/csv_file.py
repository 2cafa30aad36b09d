"""Schedules as CSV files: one row of cells such as "0F1" per stage.

The format is that of PyTorch's compute-only pipeline schedules, so those can be read here and the
files written here there.
"""

from __future__ import annotations

import csv
import os
import pathlib
import re

from kdist.pipeline.instructions import KINDS, Instruction
from kdist.pipeline.schedule import Schedule

_CELL = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d+)")
_COMMENT = "#"


def write_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes a schedule as text that `read_csv` and people read.

    Args:
        schedule: Any schedule.
        path: File to write; an existing one is replaced.

    Example:
    ```python
    from kdist.pipeline import get_schedule, write_csv

    write_csv(get_schedule("1f1b", stages=2, micro_batches=2), "mine.csv")
    ```
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = ([one.cell(schedule.num_stages) for one in row] for row in schedule.stages)
        csv.writer(file, lineterminator="\n").writerows(rows)


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """Reads a schedule: row i holds the instructions of stage i, in order.

    A cell is virtual stage, letter, micro-batch: `2F0` is the forward of micro-batch 0 on virtual
    stage 2, which with 2 rows is chunk 1 of stage 0 (virtual stage = chunk * rows + row). Letters:
    F forward, B whole backward, I gradient of the inputs, W gradient of the weights. Empty cells
    are idle time in the eyes of the author and are skipped: only the order counts. Lines that are
    empty or start with `#` are skipped too. Spaces around a cell do not matter.

    Args:
        path: An existing file.

    Returns:
        The schedule, named after the file, not yet validated.

    Raises:
        ValueError: If a cell is of another form, or is in the row of another stage.

    Example:
    ```python
    from kdist.pipeline import get_schedule, read_csv, write_csv

    write_csv(get_schedule("1f1b", stages=2, micro_batches=2), "mine.csv")
    print(read_csv("mine.csv"))
    ```
    """
    path = pathlib.Path(path)
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith(_COMMENT)]
    rows = [
        [(column, cell.strip()) for column, cell in enumerate(row, 1) if cell.strip()]
        for row in csv.reader(kept)
    ]
    stages = tuple(
        tuple(_instruction(cell, row, column, len(rows), path) for column, cell in cells)
        for row, cells in enumerate(rows)
    )
    if not any(stages):
        raise ValueError(
            "A schedule file holds one row of cells such as 0F1 per stage, and at least one cell. "
            f"Received: path={str(path)!r}"
        )
    return Schedule(name=path.stem, stages=stages)


def _instruction(cell: str, row: int, column: int, rows: int, path: pathlib.Path) -> Instruction:
    where = f"row {row}, cell {column} of {path}"
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(
            "A cell is a virtual stage, one of the letters F (forward), B (backward), I (gradient "
            "of the inputs), W (gradient of the weights), and a micro-batch, such as 0F1. "
            f"Received: {cell!r} in {where}"
        )
    virtual, letter, micro_batch = int(match[1]), match[2], int(match[3])
    chunk, stage = divmod(virtual, rows)
    if stage != row:
        own = ", ".join(str(row + k * rows) for k in range(3))
        raise ValueError(
            f"With {rows} rows, the virtual stages of row {row} are {own}, ...: chunk * rows + "
            f"row. Move the cell to row {stage}, or rename it. Received: {cell!r} in {where}"
        )
    return KINDS[letter](stage, micro_batch, chunk)
