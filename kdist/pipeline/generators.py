"""The order of instructions of the known schedules.

Each function gives one tuple of instructions per stage for p stages, m micro-batches and v chunks
per stage. Every virtual stage takes the micro-batches in ascending order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdist.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
)

Rows = tuple[tuple[Instruction, ...], ...]
Unit = tuple[int, int]
"""(chunk, micro-batch)"""


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Rows:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    Bubble share (p - 1) / (m + p - 1), m live activations on every stage. Backwards are taken in
    ascending order too, so that every stage accumulates gradients in one order.
    """
    _only_one_chunk("gpipe", chunks)
    return tuple(
        tuple(kind(stage, batch) for kind in (Forward, Backward) for batch in range(micro_batches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Rows:
    """One forward, one backward (PipeDream-Flush, Narayanan et al. 2021).

    Stage s starts with p - s - 1 forwards, then each forward is followed by the oldest backward.
    Bubble share (p - 1) / (m + p - 1) as GPipe, but min(p - s, m) live activations.
    """
    _only_one_chunk("1f1b", chunks)
    units = [(0, batch) for batch in range(micro_batches)]
    return tuple(_alternate(s, units, units, stages - s - 1) for s in range(stages))


def interleaved(stages: int, micro_batches: int, chunks: int) -> Rows:
    """1F1B over several chunks per stage (Megatron-LM, Narayanan et al. 2021).

    Micro-batches go through the chunks in groups of at least p (Megatron's are exactly p; where p
    does not divide m, the groups here differ by at most one). Stage s starts with
    2 (p - s - 1) + (v - 1) g forwards, with g the size of the largest group. Bubble share
    (p - 1) / (v m + p - 1) for m >= p.
    """
    if chunks < 2:
        raise ValueError(
            "'interleaved' needs at least 2 chunks per stage; with one it is '1f1b'. "
            f"Received: schedule='interleaved', chunks={chunks}"
        )
    groups = micro_batch_groups(stages, micro_batches)
    forwards = [(c, b) for group in groups for c in range(chunks) for b in group]
    backwards = [(c, b) for group in groups for c in reversed(range(chunks)) for b in group]
    return tuple(
        _alternate(s, forwards, backwards, warm_up(stages, micro_batches, chunks, s))
        for s in range(stages)
    )


def warm_up(stages: int, micro_batches: int, chunks: int, stage: int) -> int:
    """Forwards of a stage of the interleaved schedule before forward and backward alternate."""
    largest = len(micro_batch_groups(stages, micro_batches)[0])
    return min(2 * (stages - stage - 1) + (chunks - 1) * largest, micro_batches * chunks)


def micro_batch_groups(stages: int, micro_batches: int) -> list[range]:
    """Consecutive groups of at least p micro-batches, sizes differing by at most one.

    Fewer micro-batches than stages are one group.
    """
    count = max(1, micro_batches // stages)
    size, larger = divmod(micro_batches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def zero_bubble(stages: int, micro_batches: int, chunks: int = 1) -> Rows:
    """1F1B with the backward split (ZB-H1 of "Zero Bubble Pipeline Parallelism", Qi et al. 2023).

    The gradient of the inputs leaves for the stage before at once; stage s puts each weight
    gradient off by s micro-batches, which fills the wait of 1F1B. With forward, input gradient and
    weight gradient of equal cost the bubble share is (p - 1) / (3 m + p - 1) for large m, a third
    of 1F1B's; no stage keeps more than min(p, m) activations, as 1F1B's first.
    """
    _only_one_chunk("zero_bubble", chunks)
    return tuple(_split(s, stages, micro_batches) for s in range(stages))


def _split(stage: int, stages: int, micro_batches: int) -> tuple[Instruction, ...]:
    row: list[Instruction] = []
    batches = range(micro_batches)
    started = min(stages - stage - 1, micro_batches)
    row += [Forward(stage, b) for b in batches[:started]]
    for b in batches:
        if started + b < micro_batches:
            row.append(Forward(stage, started + b))
        row.append(BackwardInput(stage, b))
        if b >= stage:
            row.append(BackwardWeight(stage, b - stage))
    row += [BackwardWeight(stage, b) for b in batches[max(0, micro_batches - stage) :]]
    return tuple(row)


def _alternate(
    stage: int, forwards: Sequence[Unit], backwards: Sequence[Unit], first: int
) -> tuple[Instruction, ...]:
    """`first` forwards, then forward and backward in turn, then the backwards that are left."""
    first = min(first, len(forwards))
    row: list[Instruction] = [Forward(stage, b, c) for c, b in forwards[:first]]
    for i, (c, b) in enumerate(backwards):
        if first + i < len(forwards):
            chunk, batch = forwards[first + i]
            row.append(Forward(stage, batch, chunk))
        row.append(Backward(stage, b, c))
    return tuple(row)


def _only_one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ValueError(
            f"{name!r} has one chunk per stage. For several use schedule='interleaved'. "
            f"Received: schedule={name!r}, chunks={chunks}"
        )
