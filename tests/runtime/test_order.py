"""In which order instructions are written down, and the state that goes between micro-batches."""

from __future__ import annotations

from kdist.pipeline import Backward, Forward, Schedule, get_schedule
from kdist.pipeline.dependencies import Dependencies
from kdist.runtime.order import execution_order, forward_only, forwards_first

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCHEDULES = st.sampled_from(("gpipe", "1f1b", "interleaved", "zero_bubble"))
SIZES = st.integers(1, 5)


@given(SCHEDULES, SIZES, SIZES, st.data())
def test_everything_comes_after_what_it_uses(
    name: str, stages: int, micro: int, data: st.DataObject
) -> None:
    schedule = get_schedule(name, stages=stages, micro_batches=micro)
    last = schedule.virtual_stages - 1
    users = sorted(data.draw(st.sets(st.integers(0, last), max_size=3)))
    if name == "interleaved" and len(users) > 1:
        users = users[:1]  # chunks of one stage cannot wait for each other's micro-batches
    order = execution_order(schedule, {"state": users} if users else {})
    assert set(order) == set(schedule) and len(order) == len(set(order))
    place = {one: i for i, one in enumerate(order)}
    dependencies = Dependencies(schedule)
    for one in order:
        assert all(place[other] < place[one] for other in dependencies.inputs(one))
    for row in schedule.stages:
        assert [*row] == sorted(row, key=lambda one: place[one])
    forwards = [
        (one.micro_batch, one.virtual_stage(stages))
        for one in order
        if isinstance(one, Forward) and one.virtual_stage(stages) in users
    ]
    assert forwards == sorted(forwards)  # micro-batch by micro-batch, stage by stage


@given(SCHEDULES, SIZES, SIZES)
def test_all_forwards_may_come_first(name: str, stages: int, micro: int) -> None:
    schedule = get_schedule(name, stages=stages, micro_batches=micro)
    first = forwards_first(schedule)
    assert first.forwards_first and set(execution_order(first)) == set(schedule)
    assert forward_only(first) == forward_only(schedule)


@given(SCHEDULES, SIZES, SIZES)
def test_forwards_alone_run(name: str, stages: int, micro: int) -> None:
    schedule = forward_only(get_schedule(name, stages=stages, micro_batches=micro))
    order = execution_order(schedule)
    assert len(order) == schedule.virtual_stages * micro
    assert all(isinstance(one, Forward) for one in order)


def test_interleaving_refuses_state_that_chunks_share() -> None:
    schedule = get_schedule("interleaved", stages=2, micro_batches=2)
    with pytest.raises(ValueError, match="use schedule='1f1b'.*shared"):
        execution_order(schedule, {"shared": [0, 2]})


def test_state_refuses_another_order() -> None:
    rows = ((Forward(0, 1), Forward(0, 0), Backward(0, 0), Backward(0, 1)),)
    schedule = Schedule(stages=rows)
    assert execution_order(schedule)[0] == Forward(0, 1)
    with pytest.raises(ValueError, match="in ascending order.*norm/moving_mean"):
        execution_order(schedule, {"norm/moving_mean": [0]})
