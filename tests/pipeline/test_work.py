"""What stages do with weights: made for any schedule, proved, and refused when broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.pipeline import (
    Await,
    Backward,
    Forward,
    Free,
    Gather,
    Penalty,
    Receive,
    Reduce,
    Schedule,
    Send,
    Update,
    WeightUse,
    Work,
    check_work,
    get_schedule,
    work_of,
)
from kdist.pipeline.communication import with_transfers
from kdist.pipeline.work import Step

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .schedules import named


@st.composite
def used(draw: st.DrawFn) -> tuple[Schedule, list[WeightUse]]:
    """A schedule whose virtual stages use some weights, a few of them several stages."""
    schedule = draw(named())
    uses = []
    for virtual in range(schedule.virtual_stages):
        shared = draw(st.sets(st.sampled_from([900, 901]), max_size=2))
        mine = [10 * virtual + n for n in range(draw(st.integers(0, 3)))] + sorted(shared)
        some = st.lists(st.sampled_from(mine), unique=True) if mine else st.just([])
        penalized = draw(some)
        looks = {letter: draw(some) for letter in "FBIW"}
        looks["P"] = [w for w in penalized if draw(st.booleans())]
        uses.append(WeightUse(looks, tuple(draw(some)), tuple(penalized)))
    return schedule, uses


def pairs(weights: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(weights[i : i + 2]) for i in range(0, len(weights), 2)]


@given(used(), st.booleans(), st.booleans(), st.sets(st.integers(0, 20)))
def test_what_is_made_is_right(
    given_: tuple[Schedule, list[WeightUse]], free: bool, early: bool, kept: set[int]
) -> None:
    schedule, uses = given_
    check_work(work_of(schedule, uses, pairs, kept=kept, free=free, early=early), uses)
    forwards = Schedule(
        stages=tuple(tuple(o for o in row if isinstance(o, Forward)) for row in schedule.stages)
    )
    work = work_of(forwards, uses, pairs, kept=kept)
    check_work(work, uses)
    assert not work.of(Reduce) and len(work.of(Penalty)) == sum(bool(u.penalized) for u in uses)


INTERLEAVED = get_schedule("interleaved", stages=2, micro_batches=2)
USES = [
    WeightUse({"F": (2 * v, 2 * v + 1), "B": (2 * v + 1,), "P": (2 * v,)}, (2 * v, 2 * v + 1), p)
    for v, p in enumerate([(0,), (), (), ()])
]


def test_a_stage_gathers_when_it_turns_to_a_chunk_and_frees_when_it_turns_away() -> None:
    row = [one.cell(2) for one in work_of(INTERLEAVED, USES, pairs, free=True).stages[0]]
    assert " ".join(row) == (
        "0G(0,1) 0F0 0F0>1 0F1 0F1>1 0X(0,1) "
        "2G(4,5) 2<1F0 2F0 2F0>3 2<1F1 2F1 2F1>3 2<3B0 2B0 2B0>1 2<3B1 2B1 2B1>1 2R(4,5) 2X(4,5) "
        "0G(1) 0<1B0 0B0 0G(0) 0P(0) 0<1B1 0B1 0R(0,1) 0X(1,0) 0U(0,1,4,5)"
    )


def test_what_is_kept_is_gathered_once() -> None:
    work = work_of(INTERLEAVED, USES, kept=range(8))
    assert sorted(w for one in work.of(Gather) for w in one.weights) == list(range(8))


def test_a_stage_waits_for_all_but_the_last_sum() -> None:
    schedule = get_schedule("interleaved", stages=2, micro_batches=2, chunks=4)
    uses = [WeightUse(gradients=(v,)) for v in range(8)]
    work = work_of(schedule, uses, free=True)
    # Nobody waits for the last but one: after the last nothing is computed.
    assert [one.weights for one in work.of(Await) if one.stage == 0] == [(6,), (4,)]
    assert not work_of(schedule, uses).of(Await)


def test_gradients_of_several_stages_are_summed_at_the_end_of_the_first_one() -> None:
    uses = [WeightUse(gradients=(0, 9)), WeightUse(gradients=(1, 9))]
    work = work_of(get_schedule("1f1b", stages=2, micro_batches=3), uses)
    assert work.stages[0][-2:] == (Reduce(0, (9,)), Update(0, (0, 9)))
    assert work.stages[1][-2:] == (Reduce(1, (1,)), Update(1, (1,)))


def test_sums_are_used_before_those_of_the_next_but_one_where_they_may() -> None:
    schedule = get_schedule("interleaved", stages=2, micro_batches=2, chunks=4)
    uses = [WeightUse(gradients=(v,)) for v in range(8)]

    def row(*, early: bool) -> str:
        found = work_of(schedule, uses, early=early).stages[0]
        return " ".join(one.cell(2) for one in found if isinstance(one, Reduce | Update))

    assert row(early=True) == "6R(6) 4R(4) 0U(6) 2R(2) 0U(4) 0R(0) 0U(0,2)"
    assert row(early=False) == "6R(6) 4R(4) 2R(2) 0R(0) 0U(0,2,4,6)"


@pytest.mark.parametrize(
    ("looks", "updates"),
    [(6, [(6,), (4,), (0, 2)]), (0, [(4, 6), (0, 2)]), (1, [(4,), (0, 2, 6)])],
)
def test_nothing_is_written_that_is_looked_at_later(looks: int, updates: list[Any]) -> None:
    """A virtual stage looks at weight 6 of the last one of stage 0."""
    schedule = get_schedule("interleaved", stages=2, micro_batches=2, chunks=4)
    uses = [WeightUse({"B": (6,)} if v == looks else {}, gradients=(v,)) for v in range(8)]
    work = work_of(schedule, uses, early=True)
    check_work(work, uses)
    assert [one.weights for one in work.of(Update) if one.stage == 0] == updates


def test_gradients_that_travel_together_are_summed_when_all_are_complete() -> None:
    schedule = get_schedule("interleaved", stages=2, micro_batches=2, chunks=4)
    uses = [WeightUse(gradients=(v,)) for v in range(8)]
    found = work_of(schedule, uses, pairs, free=True).stages[0]
    row = [one.cell(2) for one in found if isinstance(one, Reduce | Await)]
    assert row == ["4R(4,6)", "4A(4,6)", "0R(0,2)"]


def swapped(row: list[Step], kind: type, other: Callable[[Step], bool]) -> list[Step]:
    """With the first instruction of a kind behind the next one that `other` accepts."""
    i = next(i for i, one in enumerate(row) if isinstance(one, kind))
    j = next(j for j, one in enumerate(row) if j > i and other(one))
    return [*row[:i], *row[i + 1 : j + 1], row[i], *row[j + 1 :]]


def without(row: list[Step], kind: type) -> list[Step]:
    return [one for one in row if not isinstance(one, kind)]


def computes(one: Step) -> bool:
    return isinstance(one, Forward | Backward)


BROKEN: dict[str, tuple[Callable[[list[Step]], list[Step]], str]] = {
    "gathered late": (lambda r: swapped(r, Gather, computes), "Put a Gather of them before it"),
    "never gathered": (
        lambda r: without(r, Gather),
        "Put a Gather of them before it",
    ),
    "gathered twice": (lambda r: [r[0], *r], "Free them before"),
    "never freed": (
        lambda r: [one for i, one in enumerate(r) if i < 7 or not isinstance(one, Free)],
        "Add a Free",
    ),
    "reduced early": (
        lambda r: [*r[:-5], r[-3], *r[-5:-3], *r[-2:]],
        r"gradients of \d are added until",
    ),
    "reduced twice": (lambda r: [*r, r[-3]], "Keep it once"),
    "not reduced": (
        lambda r: [*r[:-3], r[-2], Update(0, (4, 5))],
        "Keep one Reduce of each weight",
    ),
    "not updated": (lambda r: without(r, Update), r"no Update of \[0, 1, 4, 5\]"),
    "updated twice": (lambda r: [*r, r[-1]], "Keep it once"),
    "updated early": (lambda r: [*r[:-3], r[-1], *r[-3:-1]], "before their Reduce"),
    "looked at when updated": (
        lambda r: [*r, Gather(0, (4,)), Free(0, (4,))],
        r"has an Update of \[4\] before the gather",
    ),
    "no penalty": (
        lambda r: without(r, Penalty),
        "Keep one Penalty of each weight",
    ),
    "a penalty twice": (
        lambda r: [two for one in r for two in [one] * (1 + isinstance(one, Penalty))],
        "Keep it once, before",
    ),
    "not sent": (lambda r: without(r, Send), "Send what another stage uses"),
    "not received": (lambda r: without(r, Receive), "receive it between two computations"),
    "sent twice": (lambda r: [*r, next(o for o in r if isinstance(o, Send))], "its end is due"),
    "sent late": (lambda r: swapped(r, Send, computes), "has the forward of micro-batch 1"),
    "received late": (lambda r: swapped(r, Receive, computes), "where the receive of the activ"),
    "waited for early": (lambda r: [Await(0, (0, 1)), *r], "Move it behind"),
    "another stage's": (lambda r: [*r, Reduce(1, (2,))], "Move it to stage 1"),
    "another order": (lambda r: swapped(r, Forward, computes), "Keep its order"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused(name: str) -> None:
    change, message = BROKEN[name]
    work = work_of(INTERLEAVED, USES, pairs, free=True)
    broken: Work = dataclasses.replace(
        work, stages=(tuple(change(list(work.stages[0]))), work.stages[1])
    )
    check_work(work, USES)
    with pytest.raises(ValueError, match=message):
        check_work(broken, USES)


def test_as_many_uses_as_virtual_stages() -> None:
    for uses in (USES[:3], [*USES, WeightUse()]):
        text = f"one WeightUse per virtual stage.*Received: {len(uses)} uses of 4 virtual stages"
        with pytest.raises(ValueError, match=text):
            work_of(INTERLEAVED, uses)
        with pytest.raises(ValueError, match=text):
            check_work(work_of(INTERLEAVED, USES), uses)


@pytest.mark.parametrize("shared", [False, True])
def test_a_sum_on_a_stage_without_a_backward_is_refused(shared: bool) -> None:
    backward = (Forward(1, 0), Backward(1, 0))
    for row in (), (Forward(0, 0),):
        if row and shared:
            continue  # what has several users is summed at the end of a row
        schedule = Schedule(stages=(row, backward))
        first, second = with_transfers(schedule)
        work = Work(schedule, ((*first, Reduce(0, (0,))), second))
        uses = [WeightUse(gradients=(0,)), WeightUse(gradients=(0,) if shared else ())]
        with pytest.raises(ValueError, match="gives a gradient.*Received: stage 0 has the reduce"):
            check_work(work, uses)


def test_forwards_alone_have_no_chart() -> None:
    forwards = Schedule(stages=((Forward(0, 0),), (Forward(1, 0),)))
    work = work_of(forwards, [WeightUse({"F": (0,)}), WeightUse()])
    with pytest.raises(ValueError, match="forwards alone.*print.*Received: schedule='custom'"):
        work.chart()


def test_it_is_drawn_under_the_cells() -> None:
    text = work_of(INTERLEAVED, USES, pairs, free=True).chart().text(100)
    lines = text.splitlines()
    cells, messages, below = lines[1:4]
    assert below[cells.index("F0a")] == "G" and below[cells.index("F0b")] == "X"
    assert "< receive  > send  G gather  X free  P penalty  R reduce" in text
    # Sent where a cell ends, received where one begins.
    assert messages[cells.index("F1a") - 1] == ">" and messages[cells.index("F0b")] == "<"
    assert messages[cells.index("B0a")] == "<" and messages[cells.index("F0a")] == " "
