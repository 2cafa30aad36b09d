"""Wrong schedules are found, and named; right ones are proved right."""

from __future__ import annotations

import random

from kdist.pipeline import Forward, Schedule, validate
from kdist.pipeline.dependencies import Dependencies
from kdist.pipeline.validate import check_deadlock

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .schedules import build, named, schedule_of

WRONG = {
    "forward-missing": (
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"),
        r"stage 1 lacks forward 1F1.*add it to the list of stage 1, which is 1F0 1B0 1B1",
    ),
    "backward-missing": (("0F0 0F1 0B1", "1F0 1B0 1F1 1B1"), r"stage 0 lacks backward 0B0"),
    "stage-empty": (("0F0 0B0", ""), r"stage 1 lacks forward 1F0.*which is empty"),
    "chunk-missing": (("0F0 0B0", "1F0 3F0 3B0 1B0"), r"stage 0 lacks forward 2F0"),
    "forward-twice": (("0F0 0F0 0B0",), r"stage 0 has forward 0F0 2 times\. Keep it once"),
    "backward-twice": (("0F0 0B0 0B0",), r"backward 0B0 2 times.*counted more than once"),
    "weight-gradient-missing": (("0F0 0I0",), r"stage 0 lacks backward weight 0W0"),
    "input-gradient-missing": (("0F0 0W0",), r"stage 0 lacks backward input 0I0"),
    "weight-gradient-twice": (("0F0 0I0 0W0 0W0",), r"backward weight 0W0 2 times.*more than once"),
    "whole-and-half": (
        ("0F0 0B0 0W0",),
        r"both backward 0B0 and backward weight 0W0.*counted twice.*\(I and W\)",
    ),
    "backward-before-forward": (
        ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"),
        r"stage 0 has backward 0B1 at position 1, before the forward 0F1.*Move the forward 0F1",
    ),
    "weight-before-input": (
        ("0F0 0W0 0I0",),
        r"backward weight 0W0.*before the backward input 0I0",
    ),
    "deadlock": (
        ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        r"deadlock: stage 0 waits in backward 0B0 for backward 1B0, which stage 1 has at position "
        r"2, after 1F1; stage 1 waits in forward 1F1 for forward 0F1, which stage 0 has at "
        r"position 2, after 0B0\. Move 0F1 before 0B0 on stage 0",
    ),
    "deadlock-of-three": (
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"),
        r"deadlock: stage 1 waits in backward 1B0 for backward 2B0.*Move 1F1 before 1B0 on stage 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    rows, words = WRONG[name]
    with pytest.raises(ValueError, match=f"(?s){words}.*Received: schedule='mine', {len(rows)} st"):
        validate(schedule_of(*rows))


def test_the_fix_of_the_deadlock_works():
    validate(schedule_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))


@settings(max_examples=40, deadline=None)
@given(named())
def test_the_proof_is_an_order_that_runs(schedule):
    order = validate(schedule)
    assert sorted(order, key=repr) == sorted(schedule, key=repr)
    place = {one: i for i, one in enumerate(order)}
    dependencies = Dependencies(schedule)
    for row in schedule.stages:
        assert [place[one] for one in row] == sorted(place[one] for one in row)
        for one in row:
            assert len(dependencies.inputs(one)) == len(dependencies.needs(one))
            assert all(place[source] < place[one] for source in dependencies.inputs(one))


def has_cycle(schedule: Schedule) -> bool:
    """The same question answered another way: depth-first search over the dependency graph."""
    dependencies = Dependencies(schedule)
    before = {one: list(dependencies.inputs(one)) for one in schedule}
    for row in schedule.stages:
        for earlier, later in zip(row, row[1:]):
            before[later].append(earlier)
    state: dict = {}

    def visit(one):
        if state.get(one) == "open":
            return True
        if one in state:
            return False
        state[one] = "open"
        found = any(visit(other) for other in before[one])
        state[one] = "done"
        return found

    return any(visit(one) for one in schedule)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2)]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
def test_deadlocks_are_exactly_the_cycles(kind, p, m, chance: random.Random, swaps):
    """Schedules with exchanged neighbours: some run, some do not."""
    rows = [list(row) for row in build(kind[0], p, m, kind[1]).stages]
    for _ in range(swaps):
        row = chance.choice(rows)
        i = chance.randrange(len(row) - 1)
        row[i], row[i + 1] = row[i + 1], row[i]
    schedule = Schedule(stages=rows)
    cycle = has_cycle(schedule)
    hypothesis.event(f"cycle: {cycle}")
    if cycle:
        with pytest.raises(ValueError, match=r"deadlock|before the"):
            validate(schedule)
        with pytest.raises(ValueError, match=r"deadlock: .* Move \S+ before \S+ on stage \d"):
            check_deadlock(schedule)
    else:
        validate(schedule)


@settings(max_examples=60, deadline=None)
@given(named(), st.data())
def test_one_instruction_less_or_twice_is_found(schedule, data):
    hypothesis.assume(schedule.micro_batches > 1)
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    row = list(schedule.stages[stage])
    i = data.draw(st.integers(0, len(row) - 1))
    cell = row[i].cell(schedule.num_stages)
    numbers = {"micro_batches": schedule.micro_batches, "chunks": schedule.chunks}
    for changed in (row[:i] + row[i + 1 :], row + [row[i]]):
        rows = [*schedule.stages[:stage], changed, *schedule.stages[stage + 1 :]]
        with pytest.raises(ValueError, match=rf"stage {stage} (lacks|has) .*{cell}|written for"):
            validate(Schedule(stages=rows), **numbers)


def test_the_bound_on_live_activations():
    schedule = build("gpipe", 2, 4)
    validate(schedule, max_live=4)
    words = r"stage 0 keeps 4 activations.*bound is 2, first passed by forward 0F2.*raise the bound"
    with pytest.raises(ValueError, match=words):
        validate(schedule, max_live=2)
    with pytest.raises(ValueError, match=r"stage 1 keeps 4.*bound is 3.*1F3"):
        validate(schedule, max_live=(4, 3))
    with pytest.raises(
        ValueError, match=r"one for each of the 2 stages.*Received: max_live=\(1,\)"
    ):
        validate(schedule, max_live=(1,))
    with pytest.raises(ValueError, match=r"stage 1 keeps 4 .* the bound is 3"):
        validate(build("zero_bubble", 4, 8), max_live=(4, 3, 2, 1))


def test_micro_batches_in_order_if_asked():
    schedule = schedule_of("0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0")
    validate(schedule)
    with pytest.raises(ValueError, match=r"stage 0 has forward 0F1 before forward 0F0.*Exchange"):
        validate(schedule, in_order=True)


def test_a_schedule_of_one_forward_only():
    with pytest.raises(ValueError, match="lacks backward 0B0"):
        validate(Schedule(stages=[[Forward(0, 0)]]))
