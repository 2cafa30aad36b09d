"""What micro-batches keep while others run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from kdist.pipeline.known_schedules import get_schedule
from kdist.pipeline.schedule import Schedule
from kdist.stages.halves import DevicePeak
from kdist.stages.waiting import StageMemory, most_held, owned, together

import pytest
import tensorflow as tf


def schedule(name: str, micro_batches: int, chunks: int | None = None) -> Schedule:
    return get_schedule(name, stages=2, micro_batches=micro_batches, chunks=chunks)


@pytest.mark.parametrize("saved_too", [0, 48])
def test_what_the_model_returns_is_there_for_every_micro_batch(saved_too: int) -> None:
    """Beside the one that is computed, of which it is known; what is saved too, once."""
    last = StageMemory(1000, saved=128 + saved_too, returned=48, returned_too=saved_too)
    assert most_held([last], schedule("1f1b", 5), 1) == 1000 + 4 * 48
    assert most_held([last], schedule("gpipe", 5), 1) == 1000 + 4 * (128 + 48)


def test_of_what_is_put_off_less_is_kept() -> None:
    """Stage 0 keeps one that has not begun; stage 1 one whose weight gradient is put off."""
    held = StageMemory(1000, saved=100, put_off=10)
    assert [most_held([held], schedule("zero_bubble", 5), s) for s in (0, 1)] == [1100, 1010]


def test_what_goes_to_another_stage_stays_while_that_keeps_it() -> None:
    """Of what it computes itself all is known."""
    sends, takes = StageMemory(1000, sent=7, gradients=3), StageMemory(1000, gradients=3)
    plan = schedule("gpipe", 4)
    assert most_held([sends], plan, 0) == 1000 + 3 * 7 + 3
    assert most_held([takes], plan, 1) == 1000 + 3


def test_each_chunk_counts_what_the_others_keep() -> None:
    """The peak is that of whichever chunk has the most beside what is kept of both."""
    plan = schedule("interleaved", 2, 2)
    assert "stage 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1" in str(plan)
    # Chunk 1 computes beside two of chunk 0, and one of its own; chunk 0 beside one of its own.
    small, large = StageMemory(500, saved=100), StageMemory(900, saved=10)
    assert most_held([small, large], plan, 0) == 900 + 2 * 100 + 10
    assert most_held([StageMemory(2000, saved=100), large], plan, 0) == 2000 + 100


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A virtual stage with one sum on each of two devices."""

    sizes: tuple[int, int]

    def elsewhere(self) -> list[frozenset[int]]:
        return [frozenset({1}), frozenset({0})]

    def held(self, again: Collection[str], elsewhere: Collection[int]) -> StageMemory:
        there = sum(n for i, n in enumerate(self.sizes) if i not in elsewhere)
        return StageMemory(1000 - len(again) + there)


def test_of_the_devices_of_a_slice_the_one_with_most_counts() -> None:
    for sizes, most in [((5, 90), 1090), ((70, 2), 1070)]:
        peak = DevicePeak([Chunk(sizes)], schedule("1f1b", 1), 0)  # type: ignore[list-item]
        assert [peak([()]), peak([("a", "b")])] == [most, most - 2]


def test_a_buffer_is_counted_once() -> None:
    with tf.Graph().as_default():
        whole = tf.zeros((4, 8))
        view = tf.reshape(whole, (8, 4))
        assert owned([view, whole]) == {view.name: 128, whole.name: 0}


def test_views_take_nothing() -> None:
    with tf.Graph().as_default():
        whole = tf.zeros((4, 8))
        assert together([whole, tf.reshape(whole, (8, 4)), tf.ones((2,))]) == 4 * (32 + 2)
