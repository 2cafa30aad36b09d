"""Losses over the whole batch: forward passes, and programs, that a step has."""

from __future__ import annotations

import warnings
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from ..parity import CUTS, assert_close, data, mlp


class Scaled(keras.layers.Layer):
    """What TensorFlow draws, times a weight; counts how often it draws."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.drawn = self.add_weight(shape=(), initializer="zeros", trainable=False, name="drawn")

    def call(self, x: Any) -> Any:
        self.drawn.assign_add(1.0)
        # Without a seed of its own or of the process: no two operations draw the same.
        drawn = tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype)
        return self.scale * (drawn + 0 * x)


class Regularized(keras.Model):
    """A model with a `call`, and an activity regularizer, of its own."""

    def __init__(self) -> None:
        super().__init__(activity_regularizer=keras.regularizers.L2(0.0))
        self.table = keras.layers.Embedding(4, 4, name="table")
        self.scaled = Scaled(name="scaled")

    def call(self, x: Any) -> Any:
        return self.scaled(self.table(x))


class OnHost(Regularized):
    def __init__(self) -> None:
        super().__init__()
        self.table = kdist.layers.HostEmbedding(4, 4, name="table")


RECOMPUTE = {"recompute": kdist.RecomputeConfig(layers=["scaled"])}
PASSES = {
    "level 3": ({"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}, {}, Regularized),
    "level 0": ({}, {}, Regularized),
    "recompute": (RECOMPUTE, {}, Regularized),
    "table on the host": ({}, {}, OnHost),
    "XLA": ({}, {"jit_compile": True}, Regularized),
    "op by op": ({}, {"run_eagerly": True}, Regularized),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"data": 2}, {"pipe": 2}], ids=str)
@pytest.mark.parametrize("how", PASSES)
def test_there_is_one_forward_pass(how: str, axes: dict[str, int]) -> None:
    """The gradient is that of the loss that is shown: both of what was drawn once."""
    settings, compiled, make = PASSES[how]
    if "pipe" in axes:
        inputs = keras.Input((2,), dtype="int64")
        model = keras.Model(inputs, make().scaled(make().table(inputs)))
        settings = {**settings, "pipeline": kdist.PipelineConfig(micro_batches=2)}
    else:
        model = make()
        model(np.zeros((1, 2)))
    model.get_layer("scaled").drawn.assign(0.0)
    if "model" in axes and make is Regularized:
        settings = {**settings, "layout_map": {".*table/embeddings": (None, "model")}}
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **settings))
    model.compile(keras.optimizers.SGD(0.1), lambda y, found: ops.mean(found), **compiled)
    layer = model.get_layer("scaled")
    for step in range(1, 3):
        before = float(layer.scale.numpy())
        loss = model.train_on_batch(np.arange(8).reshape(4, 2) % 4, np.zeros((4, 2, 4)))
        assert_close(float(layer.scale.numpy()), before - 0.1 * loss / before)
        assert float(layer.drawn.numpy()) == step * (2 if "pipe" in axes else 1)
    assert how == "op by op" or "gathered weights" not in str(kdist.inspect(model))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("level", [3, 0])
def test_one_program_serves_batches_of_all_sizes(level: int) -> None:
    """Over inner axes, with the loss between its passes."""
    sizes = (8, 5, 3, 13, 9, 6, 10, 7, 11, 4)
    found = []
    for parallel in (False, True):
        model = mlp()
        if parallel:
            levels = kdist.OptimizerConfig(level=level, threshold_kb=0)
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(data=2, model=2), layout_map=CUTS, optimizer=levels
            )
            kdist.parallelize(model, config)
        model.compile("sgd", lambda y, found: ops.std(found - y))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*shapes")
            found.append([model.train_on_batch(*data(rows)) for rows in sizes])
    assert_close(*found)


@pytest.mark.usefixtures("float64")
def test_passes_of_one_graph_come_one_after_the_other() -> None:
    """What a trace that never runs looks at is none of them."""
    levels = kdist.OptimizerConfig(level=3, threshold_kb=0)
    model = kdist.parallelize(
        mlp(), kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=levels)
    )
    model.compile("sgd", lambda y, found: ops.std(found - y))
    x, y = data(8)

    @tf.function(autograph=False)
    def step() -> list[Any]:
        return [kdist.gradients(model, x, y)[0] for _ in range(2)]

    first, second = step()
    assert_close(float(first), float(second))
    assert len(attached(model).works()) == 2
