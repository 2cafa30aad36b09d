"""Graphs by the shape of a batch: how many are kept, and of what."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.call import MAX_SHAPES
from kdist.dtensor.retraced import CannotExpand
from kdist.runtime.by_shape import ByShape

import pytest
import tensorflow as tf


def counted(told: list[str]) -> ByShape:
    """A function of which every shape has a graph of its own."""

    def add_up(data: Any) -> Any:
        tensors = tf.nest.flatten(data)
        if any(not one.shape.is_fully_defined() for one in tensors):
            raise CannotExpand("sizes that are not known")
        return tf.add_n([tf.reduce_sum(one) for one in tensors])

    return ByShape(add_up, 1, ["/device:CPU:0"], told.append)


@pytest.mark.parametrize("kinds", [1, MAX_SHAPES])
def test_each_kind_of_batch_keeps_its_own_graphs(kinds: int) -> None:
    told: list[str] = []
    function = counted(told)
    for _ in range(2):
        for number in range(kinds):
            for rows in (2, 3):
                assert function({f"input_{number}": tf.ones((rows, 4))}).numpy() == 4 * rows
    assert len(function._alone) == 2 * kinds
    assert told == []


def test_the_oldest_of_one_kind_makes_room() -> None:
    told: list[str] = []
    function = counted(told)
    function({"other": tf.ones((1, 4))})
    for rows in (*range(1, MAX_SHAPES + 1), 1, MAX_SHAPES + 1):  # the first comes back
        function({"input": tf.ones((rows, 4))})
    (warning,) = told
    assert f"More than {MAX_SHAPES} shapes of a batch have a program of their own" in warning
    shapes = [shapes for _, shapes in function._alone]
    kept = (*range(3, MAX_SHAPES + 1), 1, MAX_SHAPES + 1)
    assert shapes == [((1, 4),), *(((rows, 4),) for rows in kept)]
