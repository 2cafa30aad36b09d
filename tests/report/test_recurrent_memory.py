"""Levels 2 and 3 free gradients and parameters of recurrent layers too.

The backward loop of a cell takes its kernels from what the forward loop returned.
"""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.pipeline.instructions import Gather
from kdist.report import memory

import keras
import numpy as np
import pytest
import tensorflow as tf

WIDTH, LAYERS, ROWS, STEPS = 16, 6, 8, 3


class InAFunction(keras.layers.Layer):
    """A layer whose computation is a function of TensorFlow."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], WIDTH), name="kernel")
        self.called = tf.function(lambda x, kernel: tf.tanh(x @ kernel), autograph=False)

    def call(self, x: Any) -> Any:
        return self.called(x, tf.convert_to_tensor(self.kernel.value))


def layer(kind: str) -> keras.layers.Layer:
    if kind == "lstm":
        return keras.layers.LSTM(WIDTH, return_sequences=True, use_bias=False)
    if kind == "cells":
        cell = keras.layers.GRUCell(WIDTH, use_bias=False)
        return keras.layers.RNN(cell, return_sequences=True)
    return InAFunction()


def prepared(kind: str, level: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((STEPS, WIDTH))
    for _ in range(LAYERS):
        x = layer(kind)(x)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2),
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        fusion=kdist.FusionConfig(mode="none"),
    )
    model = kdist.parallelize(keras.Model(inputs, x), config)
    model.compile("adam", "mse")
    batch = np.zeros((ROWS, STEPS, WIDTH), np.float32)
    attached(model).prepare("train", (batch, batch, None))
    return model


@pytest.mark.parametrize("kind", ["lstm", "cells", "function"])
@pytest.mark.parametrize("level", [2, 3])
def test_gradients_are_freed_layer_by_layer(kind: str, level: int) -> None:
    model = prepared(kind, level)
    live = memory.analyse(attached(model), ROWS)
    assert not isinstance(live, str), live
    each = sum(4 * v.shape.num_elements() for v in model.layers[1].trainable_variables)
    for device in ("/device:CPU:0", "/device:CPU:1"):
        # Of two layers those that are made, of one the sums.
        assert live.peak(device, ("gradient",)).nbytes <= 3 * each < LAYERS * each
    if level == 3:
        work = attached(model).plain_step.runner.chunks.works[0]
        gathered = [i for one in work if isinstance(one, Gather) for i in one.weights]
        # The first layer's and the last's need not be gathered again.
        assert len(gathered) >= 2 * len(model.trainable_variables) - 4
