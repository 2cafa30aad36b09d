"""Batches of several kinds: each has what its own trace taught, also where that is there already.

A kind is which inputs there are. It decides which weights the loss reaches, which state is written,
and whether a mask decides what the loss counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.attached import parallel_of

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ..parity import assert_close


class OfEither(keras.Model):
    """Takes steps with a mask, or rows; each has a layer and a count of its own."""

    def __init__(self) -> None:
        super().__init__(name="either")
        self.masking = layers.Masking(0.0)
        self.of_steps, self.of_rows, self.head = (
            layers.Dense(units, name=name)
            for units, name in ((4, "of_steps"), (4, "of_rows"), (2, "head"))
        )
        self.counts = [
            self.add_weight(shape=(), initializer="zeros", trainable=False, name=f"count_{name}")
            for name in ("steps", "rows")
        ]

    def build(self, input_shape: Any = None) -> None:
        for layer, width in ((self.of_steps, 6), (self.of_rows, 6), (self.head, 4)):
            layer.build((None, width))
        self.built = True

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        number = int("rows" in inputs)
        self.counts[number].assign(self.counts[number] + 1.0)
        if number:
            return self.head(self.of_rows(inputs["rows"]))
        return self.head(self.of_steps(self.masking(inputs["steps"])))


def kinds() -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    rng = np.random.default_rng(0)
    steps, rows = rng.normal(size=(8, 3, 6)), rng.normal(size=(8, 3, 6))
    steps[:2, 1:] = 0.0  # fewer for the first replica
    return [
        ({"steps": steps}, rng.normal(size=(8, 3, 2))),
        ({"rows": rows}, rng.normal(size=(8, 3, 2))),
    ]


def fitted(model: keras.Model, x: Any, y: Any) -> Any:
    return model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"]


def on_batch(model: keras.Model, x: Any, y: Any) -> Any:
    return model.train_on_batch(x, y)


def evaluated(model: keras.Model, x: Any, y: Any) -> Any:
    return model.evaluate(x, y, batch_size=4, verbose=0)


def predicted(model: keras.Model, x: Any, y: Any) -> Any:
    return model.predict(x, batch_size=4, verbose=0)


def own(model: keras.Model, x: Any, y: Any) -> Any:
    """A step of a loop, in a graph of its own: what is around the program is traced anew."""

    def step(x: Any, y: Any) -> Any:
        if parallel_of(model) is not None:
            loss, gradients = kdist.gradients(model, x, y)
        else:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    given = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    return tf.function(step, autograph=False)(*given)


LOOPS: dict[str, Callable] = {
    one.__name__: one for one in (own, fitted, on_batch, evaluated, predicted)
}
APART = {"fusion": kdist.FusionConfig(overlap=False)}
CUT = {"layout_map": {"either/of_(steps|rows)/kernel": (None, "model")}}
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data 2, whole": ({"data": 2}, APART),
    "data 2": ({"data": 2}, {}),
    "data 1": ({"data": 1}, {}),
    "data 2, level 3": ({"data": 2}, {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}),
    "data 2 x model 2": ({"data": 2, "model": 2}, CUT),
    "data 2 x model 2, whole": ({"data": 2, "model": 2}, APART | CUT),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loop", LOOPS)
def test_kinds_in_turns(loop: str, way: str) -> None:
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(1)
        model = OfEither()
        model.build()
        if parallel:
            axes, options = WAYS[way]
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
        model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
        results = []
        for kind in (0, 1, 0, 1, 1, 0):
            results.append(np.asarray(LOOPS[loop](model, *kinds()[kind])))
            results += model.get_weights()
            gc.collect()  # of what a step has left nothing else may be in use
        found.append(results)
    assert_close(*found)


class LookedUp(keras.Model):
    """Adds to what it is given a table's rows: of the ids of the batch, or the same for all."""

    def __init__(self) -> None:
        super().__init__(name="looked_up")
        self.table, self.head = layers.Embedding(12, 4, name="table"), layers.Dense(2, name="head")

    def build(self, input_shape: Any = None) -> None:
        self.table.build()
        self.head.build((None, 4))
        self.built = True

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        if "ids" in inputs:
            return self.head(self.table(inputs["ids"]))
        return self.head(inputs["rows"] + self.table(np.arange(3, dtype="int32"))[None])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1, 0)], ids=["ids first", "rows first"])
def test_each_kind_looks_tables_up_in_its_own_way(order: tuple[int, ...], eager: bool) -> None:
    """A table of positions in one kind: replicas look up the same rows; in the other, others."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(2, 8, 3, 2))
    of_kind = [
        ({"ids": rng.integers(0, 12, (8, 3)).astype("int32")}, targets[0]),
        ({"rows": rng.normal(size=(8, 3, 4))}, targets[1]),
    ]
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(1)
        model = LookedUp()
        model.build()
        if parallel:
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        model.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=eager)
        results = []
        for kind in order:
            results.append(on_batch(model, *of_kind[kind]))
            results += model.get_weights()
        found.append(results)
    assert_close(*found)
