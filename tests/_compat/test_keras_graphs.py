"""Every Keras internal of `kdist._compat.keras_graphs` does what kdist takes it to do."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_graphs, keras_models

import keras
import numpy as np
import pytest
import tensorflow as tf


class Sum(keras.layers.Layer):
    """Of what two layers make."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left, self.right = keras.layers.Dense(3, name="left"), keras.layers.Dense(3)

    def call(self, x: Any, other: Any) -> Any:
        return keras.ops.relu(self.left(x)) + self.right(other)


def built() -> tuple[Sum, list[Any]]:
    inputs = [keras.Input((4,)), keras.Input((2,))]
    layer = Sum()
    layer(inputs[0], other=inputs[1])
    return layer, inputs


def test_called_graph() -> None:
    layer, inputs = built()
    graph = keras_graphs.called_graph(layer, inputs[:1], {"other": inputs[1]})
    operations = [node.operation for node in keras_models.nodes_in_order(graph)]
    assert {layer.left, layer.right} < set(operations) and len(operations) == 4
    assert [tuple(one.shape) for one in graph.inputs] == [(None, 4), (None, 2)]
    assert [tuple(one.shape) for one in graph.outputs] == [(None, 3)]
    with pytest.raises(keras_graphs.NoGraph, match="is not built"):
        keras_graphs.called_graph(Sum(), inputs[:1], {"other": inputs[1]})
    layer.call = lambda x, other: tf.nn.relu(x)
    with pytest.raises(keras_graphs.NoGraph, match="takes no symbolic tensors"):
        keras_graphs.called_graph(layer, inputs[:1], {"other": inputs[1]})


def test_nodes_kept() -> None:
    layer, _ = built()
    left = layer.left
    left(keras.Input((4,)))
    before = keras_models.calls_of(left)
    with keras_graphs.nodes_kept([left]):
        left(left(keras.Input((4,)))[:, :1] * np.ones((1, 4), "float32"))
        assert len(keras_models.calls_of(left)) == len(before) + 2
    assert keras_models.calls_of(left) == before


class Built(Sum):
    """Its shapes have names."""

    def build(self, x_shape: Any, other_shape: Any) -> None:
        self.left.build(x_shape)
        self.right.build(other_shape)


def test_known_inputs() -> None:
    layer = Built()
    layer(keras.Input((4,)), keras.Input((2,)))
    args, kwargs = keras_graphs.known_inputs(layer)
    shapes = {name: tuple(one.shape) for name, one in kwargs.items()}
    assert (args, shapes) == ([], {"x": (None, 4), "other": (None, 2)})
    ((one,), none) = keras_graphs.known_inputs(layer.left)
    assert tuple(one.shape) == (None, 4) and none == {}
    assert keras_graphs.known_inputs(Sum()) is None
