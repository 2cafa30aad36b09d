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
import itertools
import math
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
    Update,
    WeightInstruction,
)
from kdist.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from kdist.pipeline.chart import Chart

Together = Callable[[Sequence[int]], Sequence[tuple[int, ...]]]
"""Positions of weights that are gathered, or have gradients -> those that travel as one message."""
T = TypeVar("T")
Step = Action | WeightInstruction

IN_FLIGHT = 1
"""Chunks whose gradients, and whose sums, may be on their way while a stage computes the next."""


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
            ValueError: If the schedule consists of forwards alone, or cannot run.
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
    early: bool = False,
) -> Work:
    """Extends a schedule by what its stages send and receive, and do with weights.

    Args:
        schedule: The schedule, or the forwards of one.
        uses: What each virtual stage has to do with weights.
        together: Which weights travel as one message, and their gradients, once all of these are
            complete; each alone by default.
        kept: Weights that a stage keeps from their first use on.
        free: Whether a stage waits for gradients to be summed, so that they take no memory; those
            of the last `IN_FLIGHT` chunks may be on their way.
        early: Whether an update needs no other sums than its own, and is done before the sums of
            the next but one are made; else all are done once all sums are there.

    Returns:
        The work, which `check_work` accepts.

    Raises:
        ValueError: If there is not one entry of `uses` per virtual stage.

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
            tuple(_Row(schedule, stage, uses, together, kept, free, early, users, arriving).steps())
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
        early: bool,
        users: Mapping[int, set[int]],
        arriving: Mapping[Instruction, Message],
    ) -> None:
        self.schedule, self.stage, self.uses = schedule, stage, uses
        self.together, self.kept, self.free, self.early = together, set(kept), free, early
        self.users, self.arriving = users, arriving
        self.leaving = {message.source: message for message in arriving.values()}
        self.held: dict[int, None] = {}
        # What several virtual stages add to is summed on the first one's stage.
        self.mine = range(stage, len(uses), schedule.num_stages)
        weights = sorted(w for w, virtuals in users.items() if min(virtuals) in self.mine)
        self.messages = list(together(weights)) if weights else []
        self.complete: set[int] = set()
        self.summed: list[list[Reduce]] = []
        self.late: list[int] = []
        self.at, self.last_looks = -1, self._last_looks() if early else {}

    def _last_looks(self) -> dict[int, float]:
        """By weight, where in the row it is looked at last; without end if other stages do."""
        row, found = self.schedule.stages[self.stage], dict[int, float]()
        for i, one in enumerate(row):
            use = self.uses[one.virtual_stage(self.schedule.num_stages)]
            for letter in (one.letter, Penalty.letter):
                found |= dict.fromkeys(use.gathered.get(letter, ()), i)
        for virtual, use in enumerate(self.uses):
            if virtual not in self.mine:
                elsewhere = itertools.chain(use.gradients, use.penalized, *use.gathered.values())
                found |= dict.fromkeys(elsewhere, math.inf)
        return found

    def steps(self) -> Iterator[Step]:
        """The instructions of the row."""
        row, count = self.schedule.stages[self.stage], self.schedule.num_stages
        differentiates = any(not isinstance(one, Forward) for one in row)
        ends = {one.chunk: i for i, one in enumerate(row)}
        penalized: set[int] = set()
        waiting: list[list[Reduce]] = []
        for i, one in enumerate(row):
            self.at = i
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
                yield from self._summed(reduces)
        if row:
            yield from self._free(row[-1].chunk, all_of_them=True)
        if differentiates:
            yield from self._summed(list(self._reduce_rest()))
            yield from self._update(len(self.summed), all_of_them=True)

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

    def _summed(self, reduces: list[Reduce]) -> Iterator[Step]:
        """The sums of a chunk, once those of the last but one have been used."""
        if reduces and self.early:
            yield from self._update(len(self.summed) - IN_FLIGHT)
        yield from reduces
        self.summed += [reduces] if reduces else []

    def _update(self, count: int, all_of_them: bool = False) -> Iterator[Update]:
        """Uses the oldest sums, but for weights that are looked at later."""
        used = [w for group in self.summed[: max(count, 0)] for one in group for w in one.weights]
        del self.summed[: max(count, 0)]
        found = sorted([*self.late, *used])
        if not all_of_them:
            found = [w for w in found if self.early and self.last_looks.get(w, -1) <= self.at]
        self.late = [w for w in (*self.late, *used) if w not in found]
        if found:
            yield Update(self.stage, tuple(found))

    def _reduce(self, virtual: int, chunk: int) -> Iterator[Reduce]:
        """What this virtual stage completes: gradients that it alone has."""
        use = self.uses[virtual]
        self.complete |= {w for w in (*use.gradients, *use.penalized) if len(self.users[w]) == 1}
        ready = [one for one in self.messages if self.complete.issuperset(one)]
        self.messages = [one for one in self.messages if one not in ready]
        if ready:
            yield Reduce(self.stage, tuple(sorted(w for one in ready for w in one)), chunk)

    def _reduce_rest(self) -> Iterator[Reduce]:
        """What several virtual stages add to, and what travels with that: waits stop nobody."""
        if left := sorted(w for one in self.messages for w in one):
            first = min(v for w in left for v in self.users[w] if v in self.mine)
            yield Reduce(self.stage, tuple(left), first // self.schedule.num_stages)
