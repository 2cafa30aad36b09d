"""Shapes that `set_shape` says are noted with their graph, and only meanwhile."""

from __future__ import annotations

from typing import Any

from kdist._compat import said_shapes

import tensorflow as tf


def _said(x: Any) -> Any:
    y = x[:, : tf.cast(tf.reduce_max(x), tf.int32)]
    y.set_shape((2, 3))
    y.set_shape((2, 3))
    x.set_shape((2, None))  # which was known
    return y


def _traced(function: Any = _said) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec((2, 4)))


def test_what_it_adds_is_noted() -> None:
    before = tf.Tensor.set_shape
    with said_shapes.noting(), said_shapes.noting():
        graph = _traced().graph
    assert tf.Tensor.set_shape is before
    ((place, shape),) = said_shapes.noted(graph).items()
    assert graph.get_operation_by_name(place[0]).outputs[place[1]].shape == (2, 3)
    assert shape.as_list() == [2, None]


def test_outside_nothing_is() -> None:
    assert said_shapes.noted(_traced().graph) == {}
    with said_shapes.noting():
        tf.constant([1.0, 2.0]).set_shape((2,))  # eager tensors check it


def test_of_an_unknown_rank_it_may_say_nothing() -> None:
    """As `tf.function`s do that read variants, and Keras's `CTC`."""

    def function(x: Any) -> Any:
        y = tf.raw_ops.PlaceholderWithDefault(input=x, shape=tf.TensorShape(None))
        y.set_shape(tf.TensorShape(None))
        assert not said_shapes.noted(y.graph)
        y.set_shape((2, 4))
        return y

    with said_shapes.noting():
        graph = _traced(function).graph
    assert [shape.rank for shape in said_shapes.noted(graph).values()] == [None]
