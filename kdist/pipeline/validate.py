"""Proves that a schedule, whoever wrote it, trains what it should and comes to an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kdist.pipeline.dependencies import Dependencies
from kdist.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
)
from kdist.pipeline.schedule import Schedule


def validate(
    schedule: Schedule,
    *,
    stages: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    max_live: int | Sequence[int] | None = None,
    in_order: bool = False,
) -> tuple[Instruction, ...]:
    """Proves a schedule right, or says what is wrong with it.

    - Complete: every virtual stage runs the forward of every micro-batch once, and either one whole
      backward or one input gradient and one weight gradient: no gradient is missing, none counted
      twice.
    - Every forward comes before its backward, every input gradient before its weight gradient.
    - No deadlock: the schedule is executed on its dependency graph until nothing is left. This is
      a proof where sending does not wait for the receiver (TensorFlow's rendezvous and the edges of
      one graph). For channels without buffers, where the order of sends and receives matters too,
      `kdist.pipeline.stage_actions` makes an order that cannot deadlock for any schedule that
      passes here, and `kdist.pipeline.check_actions` proves it, or any other order.
    - Live activations: no stage keeps the intermediates of more forwards than `max_live`.

    Args:
        schedule: Any schedule.
        stages: Number of stages it must have; None: any.
        micro_batches: Number of micro-batches it must have; None: any.
        chunks: Number of chunks per stage it must have; None: any.
        max_live: Largest number of live activations (see `Schedule.peak_live`), one for all stages
            or one per stage; None: no bound.
        in_order: Whether each virtual stage must take the micro-batches in ascending order, as
            statistics that are updated by one micro-batch after the other need.

    Returns:
        The proof: all instructions in an order in which they can run one by one.

    Raises:
        ValueError: Naming stage, instruction, what is missing or blocked, and the fix.

    Example:
    ```python
    from kdist.pipeline import get_schedule, validate

    validate(get_schedule("1f1b", stages=4, micro_batches=8), max_live=(4, 3, 2, 1))
    ```
    """
    _check_numbers(schedule, stages=stages, micro_batches=micro_batches, chunks=chunks)
    _check_complete(schedule)
    _check_own_order(schedule)
    if in_order:
        _check_ascending(schedule)
    order = check_deadlock(schedule)
    if max_live is not None:
        _check_live(schedule, max_live)
    return order


def _check_numbers(schedule: Schedule, **wanted: int | None) -> None:
    actual = {
        "stages": schedule.num_stages,
        "micro_batches": schedule.micro_batches,
        "chunks": schedule.chunks,
    }
    for name, value in wanted.items():
        if value is not None and value != actual[name]:
            raise ValueError(
                f"Schedule {schedule.name!r} is written for {name}={actual[name]}. Ask for that "
                f"number, or give a schedule for the one you want. Received: {name}={value}"
            )


def _check_complete(schedule: Schedule) -> None:
    count = Counter(schedule)
    for chunk in range(schedule.chunks):
        for stage in range(schedule.num_stages):
            for batch in range(schedule.micro_batches):
                unit = stage, batch, chunk
                _exactly_once(schedule, Forward(*unit), count[Forward(*unit)])
                _one_backward(schedule, unit, count)


def _one_backward(
    schedule: Schedule, unit: tuple[int, int, int], count: Counter[Instruction]
) -> None:
    whole, halves = Backward(*unit), (BackwardInput(*unit), BackwardWeight(*unit))
    if not any(count[half] for half in halves):
        _exactly_once(schedule, whole, count[whole])
        return
    if count[whole]:
        half = next(half for half in halves if count[half])
        raise _wrong(
            schedule,
            f"stage {whole.stage} has both {_named(schedule, whole)} and "
            f"{_named(schedule, half)}: a gradient would be counted twice. Keep the whole backward "
            f"(B) or its two halves (I and W)",
        )
    for half in halves:
        _exactly_once(schedule, half, count[half])


def _exactly_once(schedule: Schedule, one: Instruction, times: int) -> None:
    if times == 1:
        return
    what = f"stage {one.stage} has {_named(schedule, one)}"
    if times:
        twice = (
            "" if isinstance(one, Forward) else ": its gradients would be counted more than once"
        )
        raise _wrong(schedule, f"{what} {times} times{twice}. Keep it once")
    stage = [other.cell(schedule.num_stages) for other in schedule.stages[one.stage]]
    raise _wrong(
        schedule,
        f"stage {one.stage} lacks {_named(schedule, one)}. Every virtual stage runs the forward "
        f"and the backward of each of the {schedule.micro_batches} micro-batches: add it to the "
        f"list of stage {one.stage}, which is {' '.join(stage) or 'empty'}",
    )


def _check_own_order(schedule: Schedule) -> None:
    """On one stage: the forward before the backward, the input gradient before the weights'."""
    for row in schedule.stages:
        place = {one: index for index, one in enumerate(row)}
        for one in row:
            unit = one.stage, one.micro_batch, one.chunk
            if isinstance(one, Backward | BackwardInput):
                before: Instruction = Forward(*unit)
            elif isinstance(one, BackwardWeight):
                before = BackwardInput(*unit)
            else:
                continue
            if place[before] > place[one]:
                raise _wrong(
                    schedule,
                    f"stage {one.stage} has {_named(schedule, one)} at position {place[one]}, "
                    f"before the {_named(schedule, before)} that it needs, at position "
                    f"{place[before]}. Move the {_named(schedule, before)} before it",
                )


def _check_ascending(schedule: Schedule) -> None:
    last: dict[tuple[str, int, int], Instruction] = {}
    for one in schedule:
        key = one.letter, one.stage, one.chunk
        before = last.get(key)
        if before is not None and before.micro_batch > one.micro_batch:
            raise _wrong(
                schedule,
                f"stage {one.stage} has {_named(schedule, before)} before {_named(schedule, one)}, "
                "but statistics are updated by one micro-batch after the other, in ascending "
                "order. Exchange the two",
            )
        last[key] = one


def check_deadlock(schedule: Schedule) -> tuple[Instruction, ...]:
    """The part of `validate` that executes the dependency graph of a complete schedule.

    Returns:
        All instructions in an order in which they can run.

    Raises:
        ValueError: Naming the stages that wait for one another.
    """
    dependencies = Dependencies(schedule)
    rounds, position = dependencies.rounds()
    if sum(position) == sum(map(len, schedule.stages)):
        return tuple(one for ready in rounds for one in ready)
    raise _wrong(schedule, _why_stuck(dependencies, position))


def _why_stuck(dependencies: Dependencies, position: list[int]) -> str:
    """Follows who waits for whom, from the first stage that waits, until it comes back."""
    schedule = dependencies.schedule
    index = {one: i for row in schedule.stages for i, one in enumerate(row)}
    head = next(row[i] for row, i in zip(schedule.stages, position) if i < len(row))
    seen: dict[Instruction, Instruction] = {}
    while head not in seen:
        awaited = next(
            maker for maker in dependencies.inputs(head) if index[maker] >= position[maker.stage]
        )
        seen[head] = awaited
        head = schedule.stages[awaited.stage][position[awaited.stage]]
    heads = list(seen)
    loop = heads[heads.index(head) :]
    waits = [
        f"stage {one.stage} waits in {_named(schedule, one)} for {_named(schedule, seen[one])}, "
        f"which stage {seen[one].stage} has at position {index[seen[one]]}, after "
        f"{schedule.stages[seen[one].stage][position[seen[one].stage]].cell(schedule.num_stages)}"
        for one in loop
    ]
    awaited, blocked = seen[loop[-1]], head
    fix = (
        f"Move {awaited.cell(schedule.num_stages)} before {blocked.cell(schedule.num_stages)} on "
        f"stage {blocked.stage}"
    )
    return f"deadlock: {'; '.join(waits)}. {fix}"


def _check_live(schedule: Schedule, max_live: int | Sequence[int]) -> None:
    bounds = [max_live] * schedule.num_stages if isinstance(max_live, int) else list(max_live)
    if len(bounds) != schedule.num_stages:
        raise ValueError(
            f"max_live is one number, or one for each of the {schedule.num_stages} stages. "
            f"Received: max_live={max_live!r}"
        )
    for stage, (peak, bound) in enumerate(zip(schedule.peak_live(), bounds)):
        if peak > bound:
            one = _first_above(schedule.stages[stage], bound)
            raise _wrong(
                schedule,
                f"stage {stage} keeps {peak} activations at a time, the bound is {bound}, first "
                f"passed by {_named(schedule, one)}. Move a backward before it, or raise the bound",
            )


def _first_above(row: tuple[Instruction, ...], bound: int) -> Instruction:
    live = 0
    for one in row:
        live += isinstance(one, Forward)
        live -= one.letter in "BW"
        if live > bound:
            return one
    raise AssertionError("peak_live said that the bound is passed")


def _named(schedule: Schedule, one: Instruction) -> str:
    kind = one.kind.replace("_", " ")
    return f"{kind} {one.cell(schedule.num_stages)}"


def _wrong(schedule: Schedule, what: str) -> ValueError:
    return ValueError(
        f"This schedule cannot train: {what}. Received: schedule={schedule.name!r}, "
        f"{schedule.num_stages} stages, {schedule.micro_batches} micro-batches, "
        f"{schedule.chunks} chunks"
    )
