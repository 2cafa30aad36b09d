"""Sends and receives that cannot deadlock, even without buffers."""

from __future__ import annotations

from kdist.pipeline import Backward, Forward, check_actions, stage_actions
from kdist.pipeline.communication import Message, Receive, Send, incoming, with_transfers

import pytest
from hypothesis import given, settings

from .schedules import build, named


@settings(max_examples=50, deadline=None)
@given(named())
def test_actions_come_to_an_end_without_buffers(schedule):
    actions = stage_actions(schedule)
    check_actions(actions)
    for stage, row in enumerate(actions):
        computed = tuple(a for a in row if not isinstance(a, Send | Receive))
        assert computed == schedule.stages[stage]
        assert len(set(row)) == len(row)


@settings(max_examples=30, deadline=None)
@given(named())
def test_only_neighbours_talk_and_every_message_once(schedule):
    p, m, v = schedule.num_stages, schedule.micro_batches, schedule.virtual_stages
    messages = list(incoming(schedule).values())
    assert len(messages) == len(set(messages)) == (2 * m * (v - 1) if p > 1 else 0)
    for message in messages:
        step = 1 if message.content == "activation" else -1
        assert message.target.stage == (message.source.stage + step) % p
        assert message.target.micro_batch == message.source.micro_batch


def test_just_in_time_deadlocks_for_1f1b_but_not_for_gpipe():
    check_actions(with_transfers(build("gpipe", 3, 4)))
    words = (
        r"stage 0 waits in the send of the activation of micro-batch 1 from stage 0 to stage 1; "
        r"stage 1 waits in the send of the gradient of micro-batch 0 from stage 1 to stage 0"
    )
    with pytest.raises(ValueError, match=f"{words}.*stage_actions.*Received: actions of 2 stages"):
        check_actions(with_transfers(build("1f1b", 2, 4)))


def test_an_instruction_without_what_it_uses_is_found():
    message = Message(Forward(0, 0), Forward(1, 0))
    sender = [Forward(0, 0), Send(message)]
    check_actions([sender, [Receive(message), Forward(1, 0)]])
    with pytest.raises(ValueError, match=r"Stage 1 runs the forward.*before it receives the activ"):
        check_actions([sender, [Forward(1, 0), Receive(message)]])


def test_actions_of_a_small_schedule():
    first, second = stage_actions(build("1f1b", 2, 1))
    forth = Message(Forward(0, 0), Forward(1, 0))
    back = Message(Backward(1, 0), Backward(0, 0))
    assert first == (Forward(0, 0), Send(forth), Receive(back), Backward(0, 0))
    assert second == (Receive(forth), Forward(1, 0), Backward(1, 0), Send(back))
