"""A pipeline schedule: for every stage, what it computes and in which order. Pure data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kdist.pipeline import generators
from kdist.pipeline.instructions import Backward, Forward, Instruction

if TYPE_CHECKING:
    from kdist.pipeline.chart import Chart
    from kdist.pipeline.simulate import Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of the instructions of each stage.

    Two schedules are equal if their instructions are: the name does not count.

    Attributes:
        stages: One tuple of instructions per stage, in the order in which the stage runs them.
        name: What messages and charts call it.

    Raises:
        ValueError: if an instruction is in the list of another stage than its own, or nothing is
            scheduled. Whether it can run is checked by `kdist.pipeline.validate`.

    Example:
    ```python
    from kdist.pipeline import get_schedule, validate

    schedule = get_schedule("1f1b", stages=4, micro_batches=8)
    validate(schedule)
    print(schedule)  # one row of cells such as 0F1 per stage
    print(schedule.chart())  # the same over time
    ```
    """

    stages: tuple[tuple[Instruction, ...], ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(tuple(row) for row in self.stages))
        if not any(self.stages):
            raise ValueError(
                "A schedule has at least one stage with at least one instruction. "
                f"Received: stages={self.stages!r}"
            )
        for stage, row in enumerate(self.stages):
            for one in row:
                if not isinstance(one, Instruction) or not one.letter:
                    raise ValueError(
                        "A schedule consists of Forward, Backward, BackwardInput and "
                        "BackwardWeight instructions. "
                        f"Received: {one!r} in the list of stage {stage}"
                    )
                if one.stage != stage:
                    raise ValueError(
                        f"The list at index {stage} holds the instructions of stage {stage}. Move "
                        f"the instruction to the list of its stage. Received: {one!r}"
                    )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def __iter__(self) -> Iterator[Instruction]:
        for row in self.stages:
            yield from row

    @property
    def num_stages(self) -> int:
        """Number of stages, p."""
        return len(self.stages)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches, m: one more than the largest index."""
        return 1 + max(one.micro_batch for one in self)

    @property
    def chunks(self) -> int:
        """Chunks per stage, v: one more than the largest index."""
        return 1 + max(one.chunk for one in self)

    @property
    def virtual_stages(self) -> int:
        """Number of parts that the model is cut into, p * v."""
        return self.num_stages * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass is split into input gradients and weight gradients."""
        return any(not isinstance(one, Forward | Backward) for one in self)

    def peak_live(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches whose forward intermediates are kept at a time.

        A micro-batch on a chunk counts from its forward on to the end of its backward, or of its
        weight gradient where the backward is split. It depends on the order alone, not on time.
        """
        return tuple(_peak_live(row) for row in self.stages)

    def chart(self, costs: Costs | None = None) -> Chart:
        """The planned timeline, to print or to save as PNG or Chrome trace.

        Args:
            costs: What each instruction takes; by default 1 for a forward and 2 for a backward.

        Returns:
            A `kdist.pipeline.Chart`: `print(chart)`, `chart.save("plan.png")`,
            `chart.save("plan.json")`.

        Raises:
            ValueError: if the schedule cannot run, as `kdist.pipeline.validate` says.
        """
        from kdist.pipeline.chart import Chart
        from kdist.pipeline.simulate import simulate

        return Chart.of_simulation(simulate(self, costs))

    def __str__(self) -> str:
        rows = [[one.cell(self.num_stages) for one in row] for row in self.stages]
        width = max(len(cell) for row in rows for cell in row)
        lines = [
            f"Schedule {self.name}: {self.num_stages} stages, {self.micro_batches} micro-batches"
            + (f", {self.chunks} chunks" if self.chunks > 1 else "")
        ]
        for stage, row in enumerate(rows):
            lines.append(f"  stage {stage}: " + " ".join(f"{cell:<{width}}" for cell in row))
        return "\n".join(line.rstrip() for line in lines)


def _peak_live(row: tuple[Instruction, ...]) -> int:
    live = peak = 0
    for one in row:
        if isinstance(one, Forward):
            live += 1
            peak = max(peak, live)
        elif one.letter in "BW":
            live -= 1
    return peak


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
        ValueError: if a number is not a positive integer, the name is unknown, the schedule has no
            such form for these numbers, or a given one cannot run or has other numbers.

    Example:
    ```python
    print(get_schedule("interleaved", stages=2, micro_batches=4, chunks=2))
    ```
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value is None and name == "chunks":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is an integer from 1 on. Received: {name}={value!r}")
    if isinstance(schedule, str) and schedule in _GENERATORS:
        if chunks is None:
            chunks = 2 if schedule == "interleaved" else 1
        rows = _GENERATORS[schedule](stages, micro_batches, chunks)
        return Schedule(name=schedule, stages=rows)
    given = _given(schedule)
    from kdist.pipeline.validate import validate

    validate(given, stages=stages, micro_batches=micro_batches, chunks=chunks)
    return given


def _given(schedule: Any) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str | os.PathLike) and os.path.exists(schedule):
        from kdist.pipeline.csv_file import read_csv

        return read_csv(schedule)
    raise ValueError(
        f"schedule is one of {', '.join(map(repr, NAMES))}, a kdist.pipeline.Schedule, or the path "
        f"of an existing CSV file. Received: schedule={schedule!r}"
    )
