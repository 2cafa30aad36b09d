"""Losses in which the rows of a batch meet, and losses that have weights of their own.

Each is a `Case` of the zoo's MLP with the same data: what differs is what is minimised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from .attention_models import ENCODER
from .case import CLASSES, FEED_FORWARD, Case, Data
from .features import OwnLoss
from .zoo import MLP, TWO_TOWER

# Losses that couple rows -----------------------------------------------------------------------


def one_minus_dice(y: Any, p: Any) -> Any:
    """A function of the whole batch, a scalar."""
    return 1.0 - (2.0 * ops.sum(y * p) + 1.0) / (ops.sum(y) + ops.sum(p * p) + 1.0)


def correlation(y: Any, p: Any) -> Any:
    """1 minus Pearson's correlation over all entries of the batch."""
    y, p = y - ops.mean(y), p - ops.mean(p)
    return 1.0 - ops.sum(y * p) / ops.sqrt(ops.sum(y * y) * ops.sum(p * p))


def ranknet(y: Any, p: Any) -> Any:
    """Every pair of rows whose targets differ: the one that should be first, is."""
    target, score = ops.argmax(y, axis=-1), p[:, 0]
    before = ops.cast(target[:, None] > target[None, :], p.dtype)
    pairs = ops.softplus(score[None, :] - score[:, None])
    return ops.sum(before * pairs) / (ops.sum(before) + 1.0)


def contrasted(y: Any, p: Any) -> Any:
    """NT-Xent per row: (n,) numbers, each of which has the other rows as negatives."""
    same = ops.matmul(y, ops.transpose(y))
    likeness = ops.matmul(p, ops.transpose(p)) / 0.2
    return ops.categorical_crossentropy(
        same / ops.sum(same, axis=-1, keepdims=True), likeness, from_logits=True
    )


class RootMeanSquare(keras.losses.Loss):
    """A loss object whose `call` gives one number per batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class NTXent(keras.losses.Loss):
    """A contrastive loss whose negatives are the other rows of the batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(contrasted(y_true, y_pred))


class WorstRow(keras.losses.MeanSquaredError):
    """A loss object that overrides `__call__`: the worst row counts."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        each = self.call(y_true, y_pred)
        return ops.max(each if sample_weight is None else each * ops.cast(sample_weight, "float64"))


def _probabilities() -> keras.Model:
    model = MLP.build()
    outputs = layers.Activation("sigmoid", name="probabilities")(model.outputs[0])
    return keras.Model(model.inputs, outputs, name="mlp")


def _one_hot_data(seed: int, samples: int) -> Data:
    x, labels, weight = MLP.data(seed, samples)
    return x, np.eye(CLASSES)[labels], weight


def _number_data(seed: int, samples: int) -> Data:
    x, labels, weight = MLP.data(seed, samples)
    return x, labels.astype("float64"), weight


def _coupled(name: str, loss: Callable[[str], Any]) -> Case:
    return dataclasses.replace(
        MLP,
        name=name,
        build=_probabilities,
        data=_one_hot_data,
        loss=loss,
        metrics=lambda: [keras.metrics.MeanSquaredError(name="error")],
    )


def perplexity(y: Any, p: Any) -> Any:
    """A root of the whole batch's entropy: one number, times the weight of each valid position."""
    return ops.exp(ops.mean(ops.sparse_categorical_crossentropy(y, p, from_logits=True)))


def _one_number() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    x = layers.Dense(16, activation="tanh", name="up")(x)
    return keras.Model(inputs, layers.Dense(1, name="down")(x)[:, 0], name="one_number")


def _same_output_twice() -> keras.Model:
    model = _probabilities()
    return keras.Model(model.inputs, [model.outputs[0], model.outputs[0]], name="twice")


def _targets_twice(seed: int, samples: int) -> Data:
    x, y, weight = _one_hot_data(seed, samples)
    return x, [y, y], [weight, weight]


def _tower_loss(reduction: str) -> Any:
    binary = keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
    return {"click": binary, "rating": RootMeanSquare(reduction=reduction)}


COUPLED: tuple[Case, ...] = (
    _coupled("dice", lambda r: keras.losses.Dice(reduction=r)),
    _coupled("tversky", lambda r: keras.losses.Tversky(alpha=0.3, beta=0.7, reduction=r)),
    # One value per class, each over the rows.
    _coupled("dice_of_classes", lambda r: keras.losses.Dice(axis=0, reduction=r)),
    dataclasses.replace(
        _coupled("circle", lambda r: keras.losses.Circle(gamma=4.0, reduction=r)),
        data=MLP.data,
        metrics=MLP.metrics,
    ),
    _coupled("one_minus_dice", lambda r: one_minus_dice),
    _coupled("correlation", lambda r: correlation),
    _coupled("ranknet", lambda r: ranknet),
    _coupled("root_mean_square", lambda r: RootMeanSquare(reduction=r)),
    _coupled("ntxent", lambda r: NTXent(reduction=r)),
    # One number per row, which only the graph tells from a loss of rows.
    _coupled("ntxent_of_rows", lambda r: contrasted),
    _coupled("own_call", lambda r: WorstRow(reduction=r)),
    _coupled("unreduced", lambda r: keras.losses.MeanSquaredError(reduction="none")),
    dataclasses.replace(TWO_TOWER, name="one_of_two", loss=_tower_loss),
    dataclasses.replace(
        MLP,
        name="same_output_twice",
        build=_same_output_twice,
        data=_targets_twice,
        loss=lambda r: [keras.losses.Dice(reduction=r), keras.losses.MeanSquaredError(reduction=r)],
        metrics=list,
    ),
    dataclasses.replace(ENCODER, name="masked", loss=lambda r: perplexity, metrics=list),
    # Outputs of shape (n,): a mean over the last axis is one over the rows.
    dataclasses.replace(
        MLP,
        name="one_number",
        build=_one_number,
        data=_number_data,
        loss=lambda r: keras.losses.MeanSquaredError(reduction=r),
        metrics=list,
    ),
)


# Weights that only `compute_loss` uses ---------------------------------------------------------


class Own(OwnLoss, keras.Model):
    """A model to which subclasses give what is added to the compiled loss."""


class KernelPenalty(Own):
    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        return 0.1 * ops.sum(ops.square(self.get_layer("down").kernel))


class Projection(Own):
    """A head with statistics, seeds, penalties and a metric, called on the whole batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.project = keras.Sequential(
            [
                layers.Dense(6, activity_regularizer=keras.regularizers.L2(0.01), name="wide"),
                layers.BatchNormalization(name="norm"),
                layers.Dropout(0.5, seed=3, name="drop"),
                layers.Dense(2, kernel_regularizer="l2", name="narrow"),
            ],
            name="project",
        )
        self.project.build((None, CLASSES))
        self.spread = keras.metrics.Mean(name="spread")

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        projected = self.project(y_pred, training=training)
        self.spread.update_state(ops.max(projected, axis=-1))
        extra = ops.mean(ops.square(projected))
        # After the head was called: its activity regularizer's value is among the losses now.
        for loss in self.losses:
            extra = ops.add(extra, 0.5 * loss)
        return extra


class Temperature(Own):
    """A dual encoder's learned temperature, of rows against rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        likeness = ops.matmul(y_pred, ops.transpose(x[:, :CLASSES])) * ops.exp(self.temperature)
        return ops.mean(
            ops.sparse_categorical_crossentropy(
                ops.arange(ops.shape(x)[0]), likeness, from_logits=True
            )
        )


class Centres(Own):
    """A centre per class, looked up by the labels: rows of a table, repeated ones too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.centres = layers.Embedding(8, CLASSES, name="centres")
        self.centres.build(())

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        return 0.3 * ops.mean(ops.square(y_pred - self.centres(y)))


class SharedCentres(Own):
    """A table that the forward pass looks up as well."""

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        return 0.3 * ops.mean(ops.square(y_pred - self.get_layer("table")(y)))


class DenseCentres(SharedCentres):
    """The same table, whole in the loss: rows and a dense gradient meet."""

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        table = self.get_layer("table").embeddings
        return ops.add(super().extra(x, y, y_pred, training), 0.1 * ops.sum(ops.square(table)))


class OwnCall(OwnLoss, keras.Model):
    """A model with a `call` of its own, a penalty in it, and something for training alone.

    Not an `Own`: Keras makes that a `Functional` for good once a subclass of it is one.
    """

    def __init__(self) -> None:
        super().__init__(name="mlp")
        self.up = layers.Dense(16, activation="tanh", name="up")
        self.norm = layers.LayerNormalization(name="norm")
        self.down = layers.Dense(CLASSES, name="down")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.norm.build((None, 16))
        self.down.build((None, 16))

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.norm(self.up(inputs))
        if training:
            hidden = hidden * 1.25
        penalty = 0.01 * ops.mean(ops.square(hidden))
        self.add_loss(ops.cast(penalty, keras.config.floatx()))
        return self.down(hidden)

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        seen = ops.cast(y_pred, self.scale.dtype)
        likeness = ops.matmul(seen, ops.transpose(seen)) * ops.exp(self.scale)
        extra = 0.1 * ops.mean(ops.logsumexp(likeness, axis=-1))
        for loss in self.losses:
            extra = ops.add(extra, loss)
        return extra


def _own_call() -> keras.Model:
    model = OwnCall()
    model.build((None, 12))
    return model


def _like_mlp(kind: type) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = MLP.build()
        return kind(model.inputs, model.outputs[0])

    return build


def _with_table(kind: type) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((12,), name="features")
        buckets = ops.cast(ops.floor(ops.abs(inputs[:, :3]) * 4.0) % 8.0, "int32")
        looked_up = layers.Embedding(8, CLASSES, name="table")(buckets)
        hidden = layers.Dense(8, activation="tanh", name="up")(layers.Flatten()(looked_up))
        return kind(inputs, layers.Dense(CLASSES, name="down")(hidden))

    return build


def _weighted(name: str, build: Callable[[], keras.Model], **options: Any) -> Case:
    return dataclasses.replace(MLP, name=name, build=build, **options)


WEIGHTED: tuple[Case, ...] = (
    _weighted("kernel_penalty", _like_mlp(KernelPenalty)),
    _weighted("projection", _like_mlp(Projection)),
    _weighted("temperature", _like_mlp(Temperature)),
    _weighted("centres", _like_mlp(Centres)),
    _weighted("own_call_of_the_model", _own_call),
    _weighted("shared_centres", _with_table(SharedCentres), layout_map=FEED_FORWARD),
    _weighted("dense_centres", _with_table(DenseCentres), layout_map=FEED_FORWARD),
)
BY_NAME: Mapping[str, Case] = {case.name: case for case in (*COUPLED, *WEIGHTED)}
