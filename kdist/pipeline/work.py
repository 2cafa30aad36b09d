"""All that stages do: a schedule's rows, with what they send, receive, and do with weights.

A schedule says in which order a stage computes. What goes to other stages, which weights come whole
to the stage before a computation, when they are let go, and when gradients are complete follows
from it. A stage gathers
what its next computation looks at and frees it when it turns to another of its chunks (for all
replicas of a stage this is ZeRO's third level, Rajbhandari et al. 2020). Gradients are reduced
after the last backward on the stage that adds to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from kdist.pipeline.communication import Action, Message, Receive, Send, incoming
from kdist.pipeline.instructions import (
    Await,
    Backward,
    Forward,
    Free,
    Gather,
    Instruction,
    Penalty,
    Reduce,
    WeightInstruction,
)
from kdist.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from kdist.pipeline.chart import Chart

Together = Callable[[Sequence[int]], Sequence[tuple[int, ...]]]
"""Positions of weights that are gathered at one time -> those that travel as one message."""
T = TypeVar("T")
Step = Action | WeightInstruction

IN_FLIGHT = 1
"""Chunks whose gradients may be on their way while a stage computes, where memory counts."""


@dataclasses.dataclass(frozen=True)
class WeightUse:
    """What one virtual stage has to do with weights, by their positions.

    Attributes:
        gathered: By letter of an instruction, the weights it looks at that are gathered before use,
            in the order of their use; those of `Penalty` too.
        gradients: The weights of which its backward gives a gradient.
        penalized: The weights whose penalty it computes.

    Example:
    ```python
    from kdist.pipeline import WeightUse

    WeightUse({"F": (0, 1), "B": (0,)}, gradients=(0, 1))  # 1, a bias, is not looked at backwards
    ```
    """

    gathered: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    gradients: tuple[int, ...] = ()
    penalized: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Work:
    """All that stages do in a pass: a schedule's instructions, messages, and what concerns weights.

    Attributes:
        schedule: The schedule.
        stages: One row of instructions per stage.

    Example:
    ```python
    from kdist.pipeline import WeightUse, get_schedule, work_of

    schedule = get_schedule("1f1b", stages=2, micro_batches=2)
    uses = [WeightUse({"F": (0,), "B": (0,)}, (0,)), WeightUse(gradients=(1,))]
    print(work_of(schedule, uses))
    ```
    """

    schedule: Schedule
    stages: tuple[tuple[Step, ...], ...]

    def __iter__(self) -> Iterator[Step]:
        for row in self.stages:
            yield from row

    def of(self, kind: type[T]) -> tuple[T, ...]:
        """The instructions of one kind, stage after stage."""
        return tuple(one for one in self if isinstance(one, kind))

    def chart(self) -> Chart:
        """The planned timeline of the schedule, with all else that a stage does under its line.

        They take no time there.

        Raises:
            ValueError: if the schedule consists of forwards alone, or cannot run.
        """
        if all(isinstance(one, Forward) for one in self.schedule):
            raise ValueError(
                "A chart is of a schedule that trains, and these are forwards alone: print the "
                f"work instead. Received: schedule={self.schedule.name!r}"
            )
        from kdist.pipeline.chart import Chart
        from kdist.pipeline.simulate import simulate

        return Chart.of_simulation(simulate(self.schedule), self.stages)

    def __str__(self) -> str:
        count = len(self.stages)
        rows = [" ".join(one.cell(count) for one in row) for row in self.stages]
        return "\n".join(f"stage {stage}: {row}" for stage, row in enumerate(rows))


def chunk_schedule(count: int) -> Schedule:
    """A model without stages, cut into chunks: one stage, forward through them and back again."""
    forward = [Forward(0, 0, chunk) for chunk in range(count)]
    backward = [Backward(0, 0, chunk) for chunk in reversed(range(count))]
    return Schedule(stages=((*forward, *backward),), name="chunks")


def each_alone(weights: Sequence[int]) -> list[tuple[int, ...]]:
    """Every weight travels alone."""
    return [(weight,) for weight in weights]


def work_of(
    schedule: Schedule,
    uses: Sequence[WeightUse],
    together: Together = each_alone,
    *,
    kept: Collection[int] = (),
    free: bool = False,
) -> Work:
    """Extends a schedule by what its stages send and receive, and do with weights.

    Args:
        schedule: The schedule, or the forwards of one.
        uses: What each virtual stage has to do with weights.
        together: Which weights travel as one message; each alone by default.
        kept: Weights that a stage keeps from their first use on.
        free: Whether a stage waits for gradients to be summed, so that they take no memory; those
            of the last `IN_FLIGHT` chunks may be on their way.

    Returns:
        The work, which `check_work` accepts.

    Raises:
        ValueError: if there is not one entry of `uses` per virtual stage.

    Example:
    ```python
    from kdist.pipeline import WeightUse, get_schedule, work_of

    uses = [WeightUse(gradients=(0,)), WeightUse(gradients=(1,))]
    print(work_of(get_schedule("gpipe", stages=2, micro_batches=2), uses))
    ```
    """
    check_uses(schedule, uses)
    users, arriving = _users(uses), incoming(schedule)
    return Work(
        schedule,
        tuple(
            tuple(_Row(schedule, stage, uses, together, kept, free, users, arriving).steps())
            for stage in range(schedule.num_stages)
        ),
    )


def check_uses(schedule: Schedule, uses: Sequence[WeightUse]) -> None:
    """Refuses what is not one `WeightUse` per virtual stage."""
    if len(uses) != schedule.virtual_stages:
        raise ValueError(
            "Give one WeightUse per virtual stage, an empty one where a stage has no weights. "
            f"Received: {len(uses)} uses of {schedule.virtual_stages} virtual stages"
        )


def _users(uses: Sequence[WeightUse]) -> dict[int, set[int]]:
    """By weight, the virtual stages that give it a gradient."""
    found: dict[int, set[int]] = {}
    for virtual, use in enumerate(uses):
        for weight in (*use.gradients, *use.penalized):
            found.setdefault(weight, set()).add(virtual)
    return found


class _Row:
    """One stage's row, in the making."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        uses: Sequence[WeightUse],
        together: Together,
        kept: Collection[int],
        free: bool,
        users: Mapping[int, set[int]],
        arriving: Mapping[Instruction, Message],
    ) -> None:
        self.schedule, self.stage, self.uses = schedule, stage, uses
        self.together, self.kept, self.free = together, set(kept), free
        self.users, self.arriving = users, arriving
        self.leaving = {message.source: message for message in arriving.values()}
        self.held: dict[int, None] = {}

    def steps(self) -> Iterator[Step]:
        """The instructions of the row."""
        row, count = self.schedule.stages[self.stage], self.schedule.num_stages
        differentiates = any(not isinstance(one, Forward) for one in row)
        ends = {one.chunk: i for i, one in enumerate(row)}
        penalized: set[int] = set()
        waiting: list[list[Reduce]] = []
        for i, one in enumerate(row):
            if i and one.chunk != row[i - 1].chunk:
                yield from self._free(row[i - 1].chunk)
            while self.free and len(waiting) > IN_FLIGHT:
                for done in waiting.pop(0):
                    yield Await(self.stage, done.weights, done.chunk)
            virtual = one.virtual_stage(count)
            yield from self._gather(one.letter, virtual, one.chunk)
            if one in self.arriving:
                yield Receive(self.arriving[one])
            yield one
            if one in self.leaving:
                yield Send(self.leaving[one])
            if one.chunk not in penalized and (one.letter in "BW" or not differentiates):
                penalized.add(one.chunk)
                yield from self._penalty(virtual, one.chunk)
            if differentiates and ends[one.chunk] == i:
                reduces = list(self._reduce(virtual, one.chunk))
                waiting.append(reduces)
                yield from reduces
        if row:
            yield from self._free(row[-1].chunk, all_of_them=True)
        if differentiates:
            yield from self._reduce_shared()

    def _gather(self, letter: str, virtual: int, chunk: int) -> Iterator[Step]:
        wanted = self.uses[virtual].gathered.get(letter, ())
        missing = [w for w in dict.fromkeys(wanted) if w not in self.held]
        self.held.update(dict.fromkeys(missing))
        for weights in self.together(missing) if missing else ():
            yield Gather(self.stage, tuple(weights), chunk)

    def _free(self, chunk: int, all_of_them: bool = False) -> Iterator[Step]:
        gone = tuple(w for w in self.held if all_of_them or w not in self.kept)
        self.held = {w: None for w in self.held if w not in gone}
        if gone:
            yield Free(self.stage, gone, chunk)

    def _penalty(self, virtual: int, chunk: int) -> Iterator[Step]:
        if weights := self.uses[virtual].penalized:
            yield from self._gather(Penalty.letter, virtual, chunk)
            yield Penalty(self.stage, weights, chunk)

    def _reduce(self, virtual: int, chunk: int) -> Iterator[Reduce]:
        """Those of which this virtual stage alone has gradients."""
        use = self.uses[virtual]
        weights = sorted({*use.gradients, *use.penalized})
        own = tuple(w for w in weights if self.users[w] == {virtual})
        if own:
            yield Reduce(self.stage, own, chunk)

    def _reduce_shared(self) -> Iterator[Reduce]:
        """At the end of the row of the first virtual stage with a gradient: waits stop nobody."""
        count = self.schedule.num_stages
        for virtual in range(self.stage, len(self.uses), count):
            shared = [w for w, users in self.users.items() if len(users) > 1]
            first = tuple(sorted(w for w in shared if min(self.users[w]) == virtual))
            if first:
                yield Reduce(self.stage, first, virtual // count)
