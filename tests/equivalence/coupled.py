"""Layers in which rows of the batch meet, and small models around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from .case import CLASSES, FEED_FORWARD, Case, Data, accuracy, sparse_loss

FEATURES = 12


class Coupled(layers.Layer):
    """Applies `function` to inputs of shape (rows, width); the result has that shape too."""

    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)


class Contrastive(layers.Layer):
    """NT-Xent: adds the loss of telling each row's second view from all other rows."""

    def call(self, inputs: Any) -> Any:
        views = ops.concatenate([inputs, ops.tanh(inputs)], axis=0)
        views = views / ops.sqrt(ops.sum(ops.square(views), axis=-1, keepdims=True))
        rows = ops.shape(inputs)[0]
        scores = ops.matmul(views, ops.transpose(views)) / 0.5
        itself = ops.eye(2 * rows, dtype=scores.dtype)
        scores = scores - 1e9 * itself
        partner = ops.roll(itself, rows, axis=1)
        loss = ops.logsumexp(scores, axis=1) - ops.sum(scores * partner, axis=1)
        self.add_loss(0.3 * ops.mean(loss))
        return inputs


class Experts(layers.Layer):
    """A mixture of experts, with the load-balancing loss of Switch Transformers."""

    def build(self, input_shape: Any) -> None:
        width = input_shape[-1]
        self.router = self.add_weight(shape=(width, 3), name="router")
        self.experts = self.add_weight(shape=(3, width, width), name="experts")

    def call(self, inputs: Any) -> Any:
        probabilities = ops.softmax(ops.matmul(inputs, self.router))
        chosen = ops.one_hot(ops.argmax(probabilities, axis=-1), 3, dtype=inputs.dtype)
        load = ops.sum(ops.mean(chosen, axis=0) * ops.mean(probabilities, axis=0))
        self.add_loss(0.5 * load)
        outputs = ops.einsum("nw,ewv->nev", inputs, self.experts)
        return ops.sum(outputs * ops.expand_dims(chosen * probabilities, -1), axis=1)


class Counters(layers.Layer):
    """Counts rows and steps, keeps running values, and averages in metrics of its own."""

    def build(self, input_shape: Any) -> None:
        def count(name: str) -> keras.Variable:
            return self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False, name=name
            )

        self.rows, self.steps = count("rows"), count("steps")
        self.running = self.add_weight(
            shape=input_shape[1:], initializer="zeros", trainable=False, name="running"
        )
        self.spread = keras.metrics.Mean(name="spread")
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.rows.assign_add(ops.shape(inputs)[0])
            self.steps.assign_add(1)
            self.running.assign(0.9 * self.running + 0.1 * ops.max(inputs, axis=0))
        self.spread.update_state(ops.std(inputs))
        self.seen.update_state(ops.ones_like(inputs[:, 0]))
        return inputs


def _mixup(x: Any) -> Any:
    return 0.7 * x + 0.3 * ops.roll(x, 1, axis=0)


def _centred(x: Any) -> Any:
    return x - ops.mean(x, axis=0)


def _scaled(x: Any) -> Any:
    return x / (1.0 + ops.std(x, axis=0))


def _attention(x: Any) -> Any:
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


def _gram(x: Any) -> Any:
    return ops.matmul(x, ops.matmul(ops.transpose(x), x)) / 10


def _differences(x: Any) -> Any:
    return ops.pad(x[1:] - x[:-1], [[1, 0], [0, 0]])


def _halves(x: Any) -> Any:
    size = ops.shape(x)[0] // 2
    return ops.concatenate([x[size:], x[:size]], axis=0)


def _rows_by_value(x: Any) -> Any:
    return ops.take(x, ops.argsort(x[:, 0]), axis=0)


def _hardest(x: Any) -> Any:
    return x - x[ops.argmax(ops.sum(x, axis=1))]


def _folded(x: Any) -> Any:
    return ops.reshape(ops.cumsum(ops.reshape(x, (-1,))), ops.shape(x)) / 10


def _doubled(x: Any) -> Any:
    twice = ops.repeat(x, 2, axis=0)
    return ops.reshape(twice, (ops.shape(x)[0], 2 * x.shape[1]))[:, : x.shape[1]] + ops.max(x)


FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "mixup": _mixup,
    "centred": _centred,
    "scaled": _scaled,
    "attention": _attention,
    "gram": _gram,
    "differences": _differences,
    "halves": _halves,
    "flipped": lambda x: x + ops.flip(x, axis=0),
    "softmax": lambda x: x * ops.softmax(x, axis=0),
    "rows_by_value": _rows_by_value,
    "sorted": lambda x: x + ops.sort(x, axis=0),
    "cumulative": lambda x: ops.cumsum(x, axis=0),
    "hardest": _hardest,
    "folded": _folded,
    "doubled": _doubled,
    "ranked": lambda x: x * ops.cast(ops.argsort(ops.argsort(x, axis=0), axis=0), x.dtype),
    "largest": lambda x: x + ops.sum(ops.top_k(ops.transpose(x), 2)[0], axis=1),
    "normalized": lambda x: x / ops.norm(x),
    "top_values": lambda x: x + ops.sum(ops.top_k(x, 2)[0], axis=1, keepdims=True),
}
LAYERS: Mapping[str, Callable[[], layers.Layer]] = {
    **{
        name: functools.partial(Coupled, function, name=name)
        for name, function in FUNCTIONS.items()
    },
    "contrastive": lambda: Contrastive(name="contrastive"),
    "experts": lambda: Experts(name="experts"),
    "counters": lambda: Counters(name="counters"),
    "batchnorm": lambda: layers.BatchNormalization(name="batchnorm"),
}
NAMED = ("contrastive", "scaled", "mixup", "centred", "experts", "counters", "batchnorm")
"""What users meet: each of these trains on other numbers where replicas compute apart."""


def _build(names: Sequence[str], statistics: bool = False) -> keras.Model:
    x = inputs = keras.Input((FEATURES,), name="features")
    x = layers.Dense(16, activation="tanh", name="up")(x)
    for name in names:
        x = LAYERS[name]()(x)
    x = layers.Dense(FEATURES, activation="tanh", name="down")(x)
    outputs: Any = layers.Dense(CLASSES, name="head")(x)
    if statistics:
        outputs = {"head": outputs, "statistics": Statistics(name="statistics")(x)}
    return keras.Model(inputs, outputs, name="coupled")


class Statistics(layers.Layer):
    """Means over the batch: an output of shape (width,), without a batch dim."""

    def call(self, inputs: Any) -> Any:
        return ops.mean(inputs, axis=0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape[1:]


def distance_of_means(y_true: Any, y_pred: Any) -> Any:
    """How far the batch's mean of targets of shape (rows, width) is from (width,) values."""
    return ops.mean(ops.square(ops.mean(y_true, axis=0) - y_pred))


def _data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, FEATURES))
    y = rng.integers(0, CLASSES, samples).astype("int32")
    return x, y, rng.uniform(0.1, 3.0, samples)


def _two_targets(seed: int, samples: int) -> Data:
    x, y, weight = _data(seed, samples)
    return x, {"head": y, "statistics": np.tanh(x)}, weight


def case(*names: str) -> Case:
    """A model with layers in which rows meet, of `LAYERS`."""
    return Case(
        name="+".join(names),
        build=functools.partial(_build, names),
        data=_data,
        layout_map=FEED_FORWARD,
        tags=frozenset({"labels", "dense"}),
    )


WITHOUT_BATCH = dataclasses.replace(
    case(),
    name="without_batch_dim",
    build=functools.partial(_build, (), statistics=True),
    data=_two_targets,
    loss=lambda reduction: {"head": sparse_loss(reduction), "statistics": distance_of_means},
    metrics=lambda: {"head": accuracy()},
)
"""A model with an output that has no batch dim, and a loss on it."""
