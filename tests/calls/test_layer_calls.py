"""Which calls of layers run over the mesh, and with which arguments cut by rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

MESHES = [{"data": 2}, {"data": 2, "model": 2}]
IDS = ["data", "inner"]
TABLE = ops.convert_to_tensor(np.random.default_rng(5).normal(size=(4, 6)))
ROWS = np.random.default_rng(6).normal(size=(10, 4, 6))  # batches of 4 have as many as the table

pytestmark = pytest.mark.usefixtures("float64")


class Inside(layers.Layer):
    """A layer with a weight that can be cut, and something of one's own."""

    def __init__(self, own: Callable) -> None:
        super().__init__()
        self.up, self._own = layers.Dense(8, "tanh", name="up"), own

    def build(self, shape: Any) -> None:
        self.up.build((None, 6))
        self.built = True

    def call(self, *given: Any, **options: Any) -> Any:
        return self._own(self.up, *given, **options)


class Stepped(keras.Model):
    """What its step makes of its layer is to be small."""

    def __init__(self, own: Callable, loss: Callable, **options: Any) -> None:
        super().__init__(**options)
        self.inside, self._loss = Inside(own), loss
        self.inside.build(None)

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(self.inside, x)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained(own: Callable, loss: Callable, axes: dict[str, int] | None) -> list[Any]:
    keras.utils.set_random_seed(0)
    model = Stepped(own, loss)
    if axes is not None:
        cuts = {".*up/kernel": (None, "model")} if "model" in axes else {}
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts))
    model.compile(keras.optimizers.Adam(0.01))
    logs = model.fit(ROWS, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return [logs["loss"], *model.get_weights()]


def options(up: Callable, x: Any, how: dict[str, float]) -> Any:
    return up(x) * how.get("by", 0.5)


CALLS: dict[str, tuple[Callable, Callable]] = {
    "a table with as many rows": (
        lambda up, x, table: up(x + table[None]),
        lambda layer, x: ops.mean(ops.square(layer(x, TABLE) - 1.0)),
    ),
    "a table comes first": (
        lambda up, table, x: up(x + table),
        lambda layer, x: ops.mean(ops.square(layer(TABLE[None], x) - 1.0)),
    ),
    "every row with every row": (
        lambda up, x, y: ops.matmul(up(x), ops.transpose(up(y))),
        lambda layer, x: ops.mean(ops.square(layer(x[:, 0], x[:, 1]) - 1.0)),
    ),
    "options of other names": (
        options,
        lambda layer, x: ops.mean(layer(x, how={"by": 3.0}) ** 2 + layer(x, how={"to": 3.0})),
    ),
    "options that are equal": (
        lambda up, x, how: up(x) * (3.0 if how is True else 0.5),
        lambda layer, x: ops.mean(layer(x, how=True) ** 2 + layer(x, how=1)),
    ),
}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_equal_one_device(name: str, axes: dict[str, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(*CALLS[name], axes)
    for one, other in zip(found, trained(*CALLS[name], None), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_layer_for_one_number_of_rows_alone_is_told() -> None:
    def own(up: Callable, x: Any) -> Any:
        return up(ops.reshape(x, (4, 24))[:, :6])

    data = np.ones((8, 4, 6))
    model = Stepped(own, lambda layer, x: ops.mean(layer(ops.reshape(x, (4, 2, 4, 6))[:, 0])))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd")
    with pytest.warns(UserWarning, match=r"'inside.*' fails on another number of rows"):
        model.fit(data, batch_size=8, verbose=0)


class Half(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(ops.cast(self(x, training=True), y.dtype) - y))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_mixed_precision(axes: dict[str, int]) -> None:
    """Weights are read as they are, though Keras calls a model with them cast."""
    losses = []
    keras.config.set_dtype_policy("mixed_float16")  # the fixture sets it back
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        first = keras.Input((6,), dtype="float32")
        hidden = layers.Dense(8, "tanh", name="up")(first)
        model = Half(first, layers.Dense(3, name="down")(hidden))
        if parallel:
            cuts = {"up/kernel": (None, "model")} if "model" in axes else {}
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts))
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        x = ROWS[:8, 0].astype("float32")
        logs = model.fit(x, x[:, :3], batch_size=4, epochs=3, shuffle=False, verbose=0)
        losses.append(logs.history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)


class Functional(keras.Model):
    @tf.function(autograph=False)
    def forward(self, x: Any) -> Any:
        return self(x, training=True)

    def train_step(self, x: Any) -> dict[str, Any]:
        inside = self.slopes(x)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.forward(x) - 1.0))
        weights = self.trainable_weights
        both = [a + b for a, b in zip(inside, tape.gradient(loss, weights))]
        self.optimizer.apply(both, weights)
        return {"loss": loss}

    @tf.function(autograph=False)
    def slopes(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(self(x, training=True) ** 2)
        return tape.gradient(loss, self.trainable_weights)


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_a_method_that_is_a_function_has_gradients_of_all_weights(axes: dict[str, int]) -> None:
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        first = keras.Input((6,))
        hidden = layers.Dense(8, "tanh", name="up")(first)
        model = Functional(first, layers.Dense(3, name="down")(hidden))
        if parallel:
            cuts = {"up/kernel": (None, "model")} if "model" in axes else {}
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts))
        model.compile(keras.optimizers.Adam(0.01))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(ROWS[:, 0], batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


class Words(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = layers.StringLookup(vocabulary=["a", "b"])
        self.words, self.down = layers.Embedding(4, 8, name="words"), layers.Dense(3, name="down")
        self.down(self.words(np.zeros((2, 2), "int32")))

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.down(self.words(self.numbers(x))) - 1.0))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_strings(axes: dict[str, int]) -> None:
    """What a look-up returns keeps the rank that the layer gives it."""
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = Words()
        if parallel:
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes)))
        model.compile(keras.optimizers.SGD(0.1))
        x = tf.data.Dataset.from_tensor_slices([["a", "b"], ["c", "a"], ["b", "b"]] * 3).batch(4)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(one device|gathered)")
            model.fit(x, epochs=2, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


class Bags(keras.Model):
    """Sums rows of a table that ragged ids name; built by its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.down = layers.Embedding(9, 8, name="words"), layers.Dense(3, name="down")

    def train_step(self, data: Any) -> dict[str, Any]:
        ids = data[0]
        with tf.GradientTape() as tape:
            found = tf.math.segment_sum(self.words(ids.values), ids.value_rowids())
            loss = ops.mean(ops.square(self.down(tf.ensure_shape(found, (None, 8))) - 1.0))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("first", ["fit", "train_on_batch"])
def test_ragged_ids_build_a_model(first: str, place: str) -> None:
    ids = tf.ragged.constant([[1, 2], [3], [1, 8, 8], [0], [5, 1]], dtype=tf.int32)
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = Bags()
        if parallel:
            kdist.place(model.words, place)
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        model.compile(keras.optimizers.Adam(0.01))
        if first == "fit":
            model.fit(tf.data.Dataset.from_tensors((ids,)).repeat(3), verbose=0)
        else:
            model.train_on_batch(ids)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


class Lengths(layers.Layer):
    def call(self, bags: Any) -> Any:
        return ops.cast(bags.row_lengths(), "float64")[:, None] * tf.reduce_sum(bags, 1)[:, None]


class Counted(keras.Model):
    """A layer of it asks ragged tensors for what dense ones have not."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.lengths, self.down = Lengths(), layers.Dense(3, name="down")
        self.lengths.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            found = tf.ensure_shape(self.lengths(data[0]), (None, 1))
            loss = ops.mean(ops.square(self.down(found) - 1.0))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_a_layer_of_ragged_tensors_is_told_as_such() -> None:
    bags = tf.ragged.constant([[1.0, 2.0], [3.0], [1.0, 8.0, 8.0], [0.5]], dtype=tf.float64)
    models = [Counted(), Counted()]
    kdist.parallelize(models[1], kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    for model in models:
        model.compile(keras.optimizers.SGD(0.001))
    models[0].train_on_batch(bags)
    with pytest.warns(UserWarning, match=r"'lengths.*' takes ragged or sparse.*one device"):
        models[1].train_on_batch(bags)
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
