"""What micro-batches keep while others run."""

from __future__ import annotations

from kdist.stages.waiting import owned, together, waiting

import pytest
import tensorflow as tf


@pytest.mark.parametrize("saved_too", [False, True])
def test_what_the_model_returns_is_there_for_every_micro_batch(saved_too: bool) -> None:
    with tf.Graph().as_default():
        inner, logits = tf.zeros((4, 8)), tf.zeros((4, 3))
        returned = tf.identity(logits)
        saved = [inner, logits] if saved_too else [inner]
        found = waiting(saved, [], [returned], {(1, 0)}, 5)
    assert found == 4 * (4 * 8 + 4 * 4 * 3)


def test_of_what_is_put_off_less_is_kept() -> None:
    with tf.Graph().as_default():
        saved, handed = [tf.zeros((4, 8)), tf.zeros((4, 3))], tf.zeros((4, 5))
        found = waiting(saved, [saved[1], handed], [], {(1, 1), (0, 2)}, 5)
    assert found == 4 * 4 * (8 + 3 + 3 + 5)


def test_a_buffer_is_counted_once() -> None:
    with tf.Graph().as_default():
        whole = tf.zeros((4, 8))
        view = tf.reshape(whole, (8, 4))
        assert owned([view, whole]) == {view.name: 128, whole.name: 0}


def test_views_take_nothing() -> None:
    with tf.Graph().as_default():
        whole = tf.zeros((4, 8))
        assert together([whole, tf.reshape(whole, (8, 4)), tf.ones((2,))]) == 4 * (32 + 2)
