"""What micro-batches keep while others run."""

from __future__ import annotations

from kdist.stages.waiting import together, waiting

import pytest
import tensorflow as tf


@pytest.mark.parametrize("saved_too", [False, True])
def test_what_the_model_returns_is_there_for_every_micro_batch(saved_too: bool) -> None:
    with tf.Graph().as_default():
        inner, logits = tf.zeros((4, 8)), tf.zeros((4, 3))
        returned, sent = tf.identity(logits), tf.zeros((4, 2))
        saved = [inner, logits] if saved_too else [inner]
        found = waiting(saved, [returned], [sent], 2, 5)
    assert found == 4 * (4 * 8 + 4 * 4 * 3 + 4 * 2)


def test_views_take_nothing() -> None:
    with tf.Graph().as_default():
        whole = tf.zeros((4, 8))
        assert together([whole, tf.reshape(whole, (8, 4)), tf.ones((2,))]) == 4 * (32 + 2)
