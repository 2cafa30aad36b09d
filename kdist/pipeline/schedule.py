"""A pipeline schedule: for every stage, what it computes and in which order. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist.pipeline.instructions import (
    Backward,
    Forward,
    Instruction,
)

if TYPE_CHECKING:
    from kdist.pipeline.chart import Chart
    from kdist.pipeline.simulate import Costs


Beside = tuple[tuple[int, int], ...]
"""What a stage keeps of other micro-batches, by chunk; see `Schedule.kept_beside`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of the instructions of each stage.

    Two schedules are equal if their instructions are: the name does not count.

    Attributes:
        stages: One tuple of instructions per stage, in the order in which the stage runs them.
        name: What messages and charts call it.

    Raises:
        ValueError: If an instruction is in the list of another stage than its own, or nothing is
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

    @property
    def forwards_first(self) -> bool:
        """Whether each stage has all its forwards before its first backward."""
        kinds = [[isinstance(one, Forward) for one in row] for row in self.stages]
        return all(row == sorted(row, reverse=True) for row in kinds)

    def peak_live(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches whose forward intermediates are kept at a time.

        A micro-batch on a chunk counts from its forward on to the end of its backward, or of its
        weight gradient where the backward is split. It depends on the order alone, not on time.
        """
        return tuple(_peak_live(row) for row in self.stages)

    def kept_beside(self) -> tuple[frozenset[Beside], ...]:
        """Per virtual stage, what its stage keeps of other micro-batches while it computes one.

        Returns:
            One for some instructions of each: per chunk of the stage, of how many others the
            backward pass has not begun, and of how many the weight gradient is put off. One of
            which no number is more than that of another is left out.
        """
        return tuple(
            _kept_beside(self.stages[v % self.num_stages], v // self.num_stages, self.chunks)
            for v in range(self.virtual_stages)
        )

    def held(self) -> tuple[int, ...]:
        """Per virtual stage, the most micro-batches of which it keeps something at a time.

        As `peak_live`, but 0 if it keeps nothing while something else runs on its stage's device.
        """
        found = [0] * self.virtual_stages
        beside = self.kept_beside()
        for virtual, ones in enumerate(beside):
            for one in ones:
                for chunk, kept in enumerate(one):
                    mine = chunk * self.num_stages + virtual % self.num_stages
                    begun = sum(kept)
                    found[mine] = max(found[mine], begun + (mine == virtual and begun > 0))
        return tuple(found)

    def chart(self, costs: Costs | None = None) -> Chart:
        """The planned timeline, to print or to save as PNG or Chrome trace.

        Args:
            costs: What each instruction takes; by default 1 for a forward and 2 for a backward.

        Returns:
            A `kdist.pipeline.Chart`: `print(chart)`, `chart.save("plan.png")`,
            `chart.save("plan.json")`.

        Raises:
            ValueError: If the schedule cannot run, as `kdist.pipeline.validate` says.
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


def _kept_beside(row: tuple[Instruction, ...], chunk: int, chunks: int) -> frozenset[Beside]:
    begun, off = [0] * chunks, [0] * chunks
    found = set()
    for one in row:
        if one.letter in "BI":
            begun[one.chunk] -= 1
        elif one.letter == "W":
            off[one.chunk] -= 1
        if one.chunk == chunk:
            found.add(tuple(zip(begun, off)))
        begun[one.chunk] += one.letter == "F"
        off[one.chunk] += one.letter == "I"
    return frozenset(one for one in found if not any(_at_most(one, m) for m in found - {one}))


def _at_most(one: Beside, other: Beside) -> bool:
    return all(a <= b for mine, its in zip(one, other) for a, b in zip(mine, its))
