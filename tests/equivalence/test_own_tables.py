"""Steps of the user's own look rows up in tables on the host, and in tables split by hand."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist.storage.fetched_table import FetchedTable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .outcome import check_arrays
from .own_steps import ROWS, Taped, targets

pytestmark = pytest.mark.usefixtures("float64")

Place = Callable[[keras.layers.Embedding], Any]


def some_ids(seed: int, columns: int, rows: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, rows, size=(ROWS, columns)).astype("int32")


class Towers(keras.Model):
    """Two towers that share a table, each called by itself, and a loss in which rows meet.

    Gradients are clipped by their norm: rows of the same id count one by one, as Keras has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(9, 8, name="words")
        self.pool = layers.GlobalAveragePooling1D()
        self.up, self.down = layers.Dense(8, "tanh", name="up"), layers.Dense(4, name="down")

    def call(self, both: Any) -> Any:
        asked, found = both
        query, item = self.up(self.pool(self.words(asked))), self.down(self.pool(self.words(found)))
        return self.down(query), item

    def loss_of(self, both: Any) -> Any:
        query, item = self(both, training=True)
        alike = ops.matmul(query, ops.transpose(item))
        numbers = ops.arange(ops.shape(alike)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(numbers, alike, from_logits=True)
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data[0])
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"loss": self.loss_of(data[0])}

    def predict_step(self, data: Any) -> Any:
        return self(data[0] if isinstance(data, tuple) else data)[0]


class Triplets(keras.Model):
    """One tower, called three times in a step with ids of one shape; no `call`."""

    def __init__(self) -> None:
        super().__init__()
        first = keras.Input((2,), dtype="int32")
        words = layers.Flatten()(layers.Embedding(9, 8, name="words")(first))
        self.tower = keras.Model(first, layers.Dense(8, "tanh", name="up")(words))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            one, like, other = (self.tower(data[:, k : k + 2], training=True) for k in (0, 2, 4))
            near = ops.sum(ops.square(one - like), axis=1)
            far = ops.sum(ops.square(one - other), axis=1)
            loss = ops.mean(ops.relu(near - far + 0.5))
        weights = self.tower.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Places(layers.Layer):
    """Adds rows that all batches look up alike, before those of the batch, in the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(9, 8, mask_zero=True, name="words")

    def build(self, shape: Any) -> None:
        self.words.build(shape)
        self.built = True

    def call(self, ids: Any) -> Any:
        places = self.words(ops.arange(1, 5))
        return places + self.words(ids)

    def compute_mask(self, ids: Any, mask: Any = None) -> Any:
        return ops.not_equal(ids, 0)


class Twice(keras.Model):
    """Its step calls it twice with ids of one shape."""

    def train_step(self, data: Any) -> dict[str, Any]:
        ids, y = data
        with tf.GradientTape() as tape:
            found = self(ids, training=True) - self(ids[:, ::-1], training=True)
            loss = self.compute_loss(y=y, y_pred=found)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def alike() -> keras.Model:
    first = keras.Input((4,), dtype="int32")
    hidden = layers.Dense(8, "tanh", name="up")(layers.GlobalAveragePooling1D()(Places()(first)))
    return Twice(first, layers.Dense(3, name="down")(hidden))


def clicks(**table: Any) -> keras.Model:
    """Ids and features; the table is one of several layers of the one call."""
    first, dense = keras.Input((4,), dtype="int32", name="ids"), keras.Input((6,), name="dense")
    words = layers.Flatten()(layers.Embedding(9, 8, name="words", **table)(first))
    hidden = layers.Dense(8, "tanh", name="up")(layers.Concatenate()([words, dense]))
    return Taped([first, dense], layers.Dense(3, name="down")(hidden))


class Tied(keras.Model):
    """Its step reads the whole table beside the look-ups: a softmax over all of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(9, 8, name="words")
        self.up = layers.Dense(8, "tanh", name="up")

    def call(self, ids: Any) -> Any:
        return self.up(self.words(ids))

    def train_step(self, data: Any) -> dict[str, Any]:
        ids, _ = data
        with tf.GradientTape() as tape:
            hidden = self(ids[:, :-1], training=True)
            logits = ops.matmul(hidden, ops.transpose(self.words.embeddings))
            far = keras.losses.sparse_categorical_crossentropy(ids[:, 1:], logits, from_logits=True)
            loss = ops.mean(far)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class Inside(keras.Model):
    """Its step calls it in a function, of which TensorFlow prepares the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.flat = layers.Embedding(9, 8, name="words"), layers.Flatten()
        self.up, self.down = layers.Dense(8, "tanh", name="up"), layers.Dense(3, name="down")
        self.far = tf.function(self.loss_of)

    def call(self, ids: Any) -> Any:
        return self.down(self.up(self.flat(self.words(ids))))

    def loss_of(self, ids: Any, y: Any) -> Any:
        return ops.mean(ops.square(self(ids, training=True) - y))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.far(*data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is compiled, what it learns from."""

    build: Callable[[], keras.Model]
    data: Callable[[], tuple[Any, ...]] = lambda: (some_ids(2, 4), targets())
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01)


def _two() -> tuple[Any, ...]:
    return (some_ids(3, 4), some_ids(4, 2)), targets()


def _both() -> tuple[Any, ...]:
    return (some_ids(2, 4), np.random.default_rng(0).normal(size=(ROWS, 6))), targets()


ZOO = {
    "towers": Case(Towers, _two),
    "towers, sgd": Case(Towers, _two, lambda: keras.optimizers.SGD(0.1)),
    "towers, lazy": Case(Towers, _two, lambda: kdist.lazy(keras.optimizers.Adam(0.01))),
    "triplets": Case(Triplets, lambda: (some_ids(5, 6),)),
    "alike": Case(alike),
    "clicks": Case(clicks, _both, lambda: keras.optimizers.Adagrad(0.1)),
    "clicks, penalty": Case(lambda: clicks(embeddings_regularizer="l2"), _both),
    "tied": Case(Tied),
    "in a function": Case(Inside),
}


def host(layer: keras.layers.Embedding) -> None:
    kdist.place(layer, "host")


def split(**how: Any) -> Place:
    return lambda layer: kdist.shard(layer, manual_split=(2, 4, 3), **how)


def halves(**how: Any) -> Place:
    return lambda layer: kdist.shard(layer, manual_split=(7, 2), **how)


CUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
MESHES: dict[str, tuple[dict[str, int], Place, dict[str, Any]]] = {
    "host, data 3": ({"data": 3}, host, {}),
    "host, data 2 x model 2, level 3": ({"data": 2, "model": 2}, host, {"level": 3}),
    "split, model 3": ({"model": 3}, split(), {}),
    "split, data 2 x model 2": ({"data": 2, "model": 2}, halves(), {}),
    "split over data 3": ({"data": 3}, split(axis="data"), {"level": 1}),
    "host, model 2, recompute": (
        {"model": 2},
        host,
        {"recompute": kdist.RecomputeConfig(layers=["(|.*/)(?:up|down)"])},
    ),
}
DEFAULT = {
    "towers": ("host, data 3", "split, data 2 x model 2"),
    "towers, sgd": ("split over data 3",),
    "triplets": ("host, data 2 x model 2, level 3",),
    "alike": ("host, data 3",),
    "clicks": ("host, data 2 x model 2, level 3",),
    "tied": ("split, data 2 x model 2",),
    "in a function": ("host, data 3", "host, model 2, recompute"),
}


def config(mesh: str, model: keras.Model) -> kdist.ParallelConfig:
    axes, _, options = MESHES[mesh]
    options = dict(options)
    level = options.pop("level", 0)
    names = {layer.name for layer in model._flatten_layers()}
    cuts = {p: cut for p, cut in CUTS.items() if p.split("/")[0].strip(".*") in names}
    return kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts if "model" in axes and "model 3" not in mesh else {},
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
        **options,
    )


def trained(name: str, mesh: str = "") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Logs of two epochs, of an evaluation and predictions where steps are own; weights."""
    keras.utils.set_random_seed(0)
    case = ZOO[name]
    model, data = case.build(), case.data()
    if mesh:
        table = next(one for one in model._flatten_layers() if isinstance(one, layers.Embedding))
        MESHES[mesh][1](table)
        kdist.parallelize(model, config(mesh, model))
    model.compile(case.optimizer(), "mse")
    logs = model.fit(*data, batch_size=10, epochs=2, verbose=0, shuffle=False).history
    found = {key: np.asarray(values, float) for key, values in logs.items()}
    if "test_step" in vars(type(model)):
        found["test"] = np.asarray(model.evaluate(*data, batch_size=10, verbose=0), float)
        found["predicted"] = model.predict(data[0], batch_size=10, verbose=0)
    return found, {str(n): v.numpy().astype(float) for n, v in enumerate(model.variables)}


one_device = functools.cache(trained)

ROWS_OF_MATRIX = [
    pytest.param(name, mesh, marks=() if mesh in DEFAULT.get(name, ()) else pytest.mark.wide)
    for name in ZOO
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "mesh"), ROWS_OF_MATRIX)
def test_own_steps_with_tables_equal_one_device(
    name: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    look_up = FetchedTable.look_up

    def counted(table: FetchedTable, s: int, *given: Any) -> None:
        fetched.append(s)
        look_up(table, s, *given)

    monkeypatch.setattr(FetchedTable, "look_up", counted)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logs, weights = trained(name, mesh)
    assert set(fetched) == set(range(MESHES[mesh][0].get("data", 1)))
    texts = [str(one.message) for one in said]
    fallbacks = ("gathered weights", "computes on one device")
    assert not any(words in text for text in texts for words in fallbacks), texts
    expected, its_weights = one_device(name)
    check_arrays("logs", expected, logs)
    check_arrays("weights", its_weights, weights)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_rows_are_those_of_a_table_on_the_device_in_mixed_precision(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.config.set_floatx("float32")  # the fixture puts both back
    keras.config.set_dtype_policy(policy)
    _, weights = trained("clicks", "host, data 3")
    monkeypatch.setitem(MESHES, "device, data 3", ({"data": 3}, lambda layer: None, {}))
    _, others = trained("clicks", "device, data 3")
    for name, value in weights.items():
        np.testing.assert_array_equal(value, others[name])
