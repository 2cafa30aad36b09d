"""An inner axis that cuts nothing makes its devices repeat each other's work: kdist says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

SAID = "the mesh axis 'model' of 2 devices has no effect: it cuts no weight"
UP = {".*up/kernel": (None, "model")}


class Cuts(keras.layers.Layer):
    """Cuts what it gets by an operator within its call, which no layout tells before."""

    def call(self, x: Any) -> Any:
        return kdist.shard(keras.ops.relu, in_strategy=((None, "model"),))(x)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.cast(y, "float32")))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def network(*between: keras.layers.Layer, kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    y = keras.layers.Dense(8, name="up")(x)
    for layer in between:
        y = layer(y)
    return kind(x, keras.layers.Dense(2, name="head")(y))


def said(model: keras.Model, step: Callable[[], Any]) -> int:
    """How often training says that the axis is idle."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        step()
    noted = sum(SAID in note for note in model.plan().notes)
    told = sum(SAID in str(one.message) for one in caught)
    assert told == noted
    return told


def fit(model: keras.Model) -> int:
    model.compile("sgd", "mse")
    return said(model, lambda: model.train_on_batch(np.ones((8, 4)), np.ones((8, 2))))


def parallel(model: keras.Model, layout_map: Any, **options: Any) -> keras.Model:
    options = {"mesh": kdist.mesh(data=2, model=2), **options}
    return kdist.parallelize(model, kdist.ParallelConfig(layout_map=layout_map, **options))


@pytest.mark.parametrize(
    ("between", "layout_map", "times"),
    [
        ([], {}, 1),
        ([], {".*up/kernel": (None, "model")}, 0),
        ([], {".*up/output": (None, "model")}, 0),
        ([], {".*up/kernel": ("data", None)}, 1),
        ([Cuts()], {}, 0),
    ],
    ids=["nothing", "a weight", "an activation", "over data", "an operator in a call"],
)
def test_training_says_it_once(between: Any, layout_map: Any, times: int) -> None:
    model = parallel(network(*between), layout_map)
    if not times:
        assert not [note for note in model.plan().notes if SAID in note]
    assert fit(model) == times


@pytest.mark.parametrize(("layout_map", "times"), [({}, 1), (UP, 0)], ids=["nothing", "one stage"])
def test_a_pipeline_says_it_of_all_stages(layout_map: Any, times: int) -> None:
    """One stage cuts something over it, and the other one nothing."""
    mesh, pipeline = kdist.mesh(pipe=2, model=2), kdist.PipelineConfig(micro_batches=2)
    assert fit(parallel(network(), layout_map, mesh=mesh, pipeline=pipeline)) == times


@pytest.mark.parametrize(("layout_map", "times"), [({}, 1), (UP, 0)], ids=["nothing", "a weight"])
def test_steps_of_ones_own_say_it(layout_map: Any, times: int) -> None:
    assert fit(parallel(network(kind=OwnStep), layout_map)) == times

    model = parallel(network(), layout_map)
    model.compile("sgd", "mse")

    @kdist.function(model)
    def step(x: Any) -> Any:
        return tf.reduce_sum(model(x, training=True))

    assert said(model, lambda: step(tf.ones((8, 4)))) == times


def test_a_table_dealt_over_it_uses_it() -> None:
    keras.utils.set_random_seed(0)
    table = keras.layers.Embedding(8, 4)
    kdist.shard(table, manual_split=(3, 5))
    pooled = keras.layers.GlobalAveragePooling1D()
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, pooled])
    parallel(model, {}).compile("sgd", "mse")
    ids = np.arange(24).reshape(8, 3) % 8
    assert said(model, lambda: model.train_on_batch(ids, np.ones((8, 4)))) == 0
