"""Proves that what stages send, receive and do with weights fits what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kdist.pipeline.communication import Transfer, with_transfers
from kdist.pipeline.instructions import (
    Await,
    Forward,
    Free,
    Gather,
    Instruction,
    Penalty,
    Reduce,
    Update,
    WeightInstruction,
)
from kdist.pipeline.work import Step, WeightUse, Work, check_uses


def check_work(work: Work, uses: Sequence[WeightUse]) -> None:
    """Proves the work of stages right, whoever wrote it, or says what is wrong with it.

    - The rows compute what the schedule says, in its order.
    - What an instruction makes for another stage is sent before the next computation, and received
      there between the computation before the one that uses it and that one.
    - What an instruction looks at is there: gathered, and not freed since. Nothing is gathered
      that is there, nothing freed that is not, and a row ends with nothing gathered.
    - Every gradient is reduced once, on a stage that has it, when no computation of that stage adds
      to it any more; one of several virtual stages at the end of a row, so that nothing waits for
      other stages.
    - Penalties are computed once, before their gradients are reduced.
    - A stage waits only for reductions of its own.
    - Every weight is updated once, on the stage of its reduction, after it; nothing that the stage
      computes or gathers later looks at the weight.

    Args:
        work: The work.
        uses: What each virtual stage has to do with weights.

    Raises:
        ValueError: Naming stage, instruction, and the fix.

    Example:
    ```python
    from kdist.pipeline import WeightUse, check_work, get_schedule, work_of

    uses = [WeightUse(gradients=(0,)), WeightUse(gradients=(1,))]
    check_work(work_of(get_schedule("1f1b", stages=2, micro_batches=2), uses), uses)
    ```
    """
    check_uses(work.schedule, uses)
    differentiates = any(not isinstance(one, Forward) for one in work.schedule)
    actions = with_transfers(work.schedule)
    for stage, row in enumerate(work.stages):
        computed = tuple(one for one in row if isinstance(one, Instruction))
        if computed != work.schedule.stages[stage]:
            raise _wrong(stage, "computes other instructions than its schedule", "Keep its order")
        _check_transfers(stage, row, actions[stage])
        _check_row(_Stage(work, stage, uses), row)
    if differentiates:
        _check_reduced(work, uses)


def _check_transfers(stage: int, row: Sequence[Step], wanted: Sequence[Step]) -> None:
    """Messages are sent by whom, and received where, they are made and used."""
    found = [one for one in row if isinstance(one, Instruction | Transfer)]
    for there, due in itertools.zip_longest(found, wanted):
        if there != due:
            raise _wrong(
                stage,
                f"has {_named(there)} where {_named(due)} is due",
                "Send what another stage uses before the next computation, and receive it between "
                "two computations, before its use",
            )


def _named(one: Step | None) -> str:
    return "its end" if one is None else f"the {one}"


class _Stage:
    """What is there on a stage, instruction after instruction."""

    def __init__(self, work: Work, stage: int, uses: Sequence[WeightUse]) -> None:
        self.work, self.stage, self.uses = work, stage, uses
        self.held: set[int] = set()
        self.reduced: set[int] = set()
        self.updated: set[int] = set()
        self.penalties: set[tuple[int, int]] = set()

    def use(self, chunk: int) -> WeightUse:
        """Of one of the stage's chunks."""
        return self.uses[chunk * self.work.schedule.num_stages + self.stage]

    def old(self, one: Step, weights: Sequence[int]) -> None:
        """Something takes weights as they were at the beginning."""
        if late := sorted(set(weights) & self.updated):
            raise _wrong(self.stage, f"has an Update of {late} before the {one}", "Move it behind")

    def look(self, one: Step, weights: Sequence[int]) -> None:
        """Something looks at weights."""
        self.old(one, weights)
        self.has(one, weights)

    def has(self, one: Step, weights: Sequence[int]) -> None:
        """Weights are there for something."""
        if missing := sorted(set(weights) - self.held):
            raise _wrong(
                self.stage, f"has no {missing} for the {one}", "Put a Gather of them before it"
            )


def _check_row(there: _Stage, row: Sequence[Step]) -> None:
    last = {(o.chunk, o.letter): i for i, o in enumerate(row) if isinstance(o, Instruction)}
    for i, one in enumerate(row):
        if isinstance(one, Transfer):
            continue
        stage, use = there.stage, there.use(one.chunk)
        weights = set() if isinstance(one, Instruction) else set(one.weights)
        if isinstance(one, WeightInstruction) and one.stage != stage:
            raise _wrong(stage, f"has the {one}", f"Move it to stage {one.stage}")
        if isinstance(one, Instruction):
            there.look(one, use.gathered.get(one.letter, ()))
        elif isinstance(one, Gather):
            there.old(one, one.weights)
            if twice := sorted(weights & there.held):
                raise _wrong(stage, f"has {twice} already at the {one}", "Free them before")
            there.held |= weights
        elif isinstance(one, Free):
            there.has(one, one.weights)
            there.held -= weights
        elif isinstance(one, Penalty):
            there.look(one, use.gathered.get(one.letter, ()))
            late = {(one.chunk, w) for w in weights} & there.penalties
            if late or weights & there.reduced:
                raise _wrong(
                    stage, f"has the {one} again, or after their Reduce", "Keep it once, before"
                )
            there.penalties |= {(one.chunk, w) for w in weights}
        elif isinstance(one, Reduce):
            _check_reduce(there, one, last, i)
            there.reduced |= weights
        elif isinstance(one, Await | Update) and not weights <= there.reduced:
            raise _wrong(stage, f"has the {one} before their Reduce", "Move it behind")
        elif isinstance(one, Update):
            if weights & there.updated:
                raise _wrong(stage, f"has the {one} again", "Keep it once")
            there.updated |= weights
    if left := sorted(there.reduced - there.updated):
        raise _wrong(there.stage, f"has no Update of {left}", "Add it behind their Reduce")
    if there.held:
        raise _wrong(there.stage, f"ends with {sorted(there.held)} gathered", "Add a Free")


def _check_reduce(there: _Stage, one: Reduce, last: dict[tuple[int, str], int], at: int) -> None:
    """No computation of the stage adds to a gradient after its reduction."""
    count = there.work.schedule.num_stages
    for weight in one.weights:
        users = [v for v, u in enumerate(there.uses) if weight in (*u.gradients, *u.penalized)]
        if weight in there.reduced or there.stage not in {v % count for v in users}:
            raise _wrong(there.stage, f"reduces {weight} twice or in vain", "Keep it once")
        ends = [
            position
            for v in users
            for letter in "BW"
            if v % count == there.stage and (position := last.get((v // count, letter))) is not None
        ]
        if not ends:
            raise _wrong(
                there.stage,
                f"has the {one}, and no backward that gives a gradient of {weight}",
                "Put it behind a backward that gives a gradient, or leave it out",
            )
        if len(users) > 1:
            ends = [max(last.values())]
        if at < max(ends):
            raise _wrong(
                there.stage,
                f"has the {one} at position {at}, but gradients of {weight} are added until "
                f"position {max(ends)}",
                "Move it behind",
            )


def _check_reduced(work: Work, uses: Sequence[WeightUse]) -> None:
    wanted = {w for use in uses for w in (*use.gradients, *use.penalized)}
    found = [w for one in work.of(Reduce) for w in one.weights]
    if sorted(found) != sorted(wanted):
        raise ValueError(
            "Every gradient is reduced once in a step. Keep one Reduce of each weight. Received: "
            f"Reduce of {sorted(found)}, gradients of {sorted(wanted)}"
        )
    planned = {(one.stage, one.chunk, w) for one in work.of(Penalty) for w in one.weights}
    count = work.schedule.num_stages
    asked = {(v % count, v // count, w) for v, use in enumerate(uses) for w in use.penalized}
    if planned != asked:
        raise ValueError(
            "Every penalty counts once in a step. Keep one Penalty of each weight that has one. "
            f"Received: {sorted(planned)}, penalties of {sorted(asked)} (stage, chunk, weight)"
        )


def _wrong(stage: int, what: str, fix: str) -> ValueError:
    return ValueError(f"This work is wrong. {fix}. Received: stage {stage} {what}")
