"""Replicas' losses combine to the single-device loss, whatever they are averaged over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.program.loss import CountedLoss, SharedLoss, shares_from_counts, term_kinds

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ..parity import assert_close, assert_same_history, assert_same_weights, data, everywhere, mlp

float64 = pytest.mark.usefixtures("float64")
long = pytest.mark.long


counted = st.just(0.0) | st.floats(1e-6, 100)


# -- shares ------------------------------------------------------------------------------------


@given(
    st.integers(1, 4).flatmap(
        lambda terms: st.lists(
            st.lists(counted, min_size=terms, max_size=terms), min_size=1, max_size=6
        )
    )
)
@settings(deadline=None, max_examples=40)
def test_shares_sum_to_one_where_anything_counts(counts):
    shares = np.array(shares_from_counts([tf.constant(c, tf.float64) for c in counts]))
    total = np.array(counts).sum(axis=0)
    np.testing.assert_allclose(shares.sum(axis=0), np.where(total > 0, 1.0, 0.0), atol=1e-12)
    assert (shares >= 0).all()


def test_shares_are_proportional():
    shares = shares_from_counts([tf.constant([3.0, 0.0]), tf.constant([1.0, 0.0])])
    assert np.array(shares).tolist() == [[0.75, 0.0], [0.25, 0.0]]


# -- kinds -------------------------------------------------------------------------------------


def built(loss: Any, **options: Any) -> keras.Model:
    model = mlp()
    model.compile("sgd", loss, **options)
    model.train_on_batch(*data(4))
    return model


@pytest.mark.parametrize(
    "reduction, summed, weight_mean",
    [
        ("sum_over_batch_size", False, False),
        ("mean", False, False),
        ("sum", True, False),
        ("mean_with_sample_weight", False, True),
    ],
)
def test_kinds(reduction, summed, weight_mean):
    model = built(keras.losses.MeanSquaredError(reduction=reduction))
    (kind,) = term_kinds(model)
    assert (kind.summed, kind.weight_mean) == (summed, weight_mean)


def test_no_compiled_loss_has_no_kinds():
    model = mlp()
    model.compile("sgd")
    assert term_kinds(model) == []


# -- one term ----------------------------------------------------------------------------------

REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"]
# `mean` is another name of `sum_over_batch_size`.
TRAINED = [pytest.param(r, marks=long if r == "mean" else ()) for r in REDUCTIONS]


@float64
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_shared_losses_of_parts_add_up(reduction, weighted, masked):
    """The definition: sum over parts of share times Keras's own value is Keras's value."""
    random = np.random.default_rng(0)
    y, predicted = random.normal(size=(7, 4, 3)), random.normal(size=(7, 4, 3))
    weight = random.uniform(size=(7, 4)) if weighted else None
    mask = random.random((7, 4)) > 0.4 if masked else None
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    kind = term_kinds(built(keras.losses.MeanSquaredError(reduction=reduction)))[0]

    def part(rows: slice) -> tuple:
        tensor = tf.constant(predicted[rows])
        if mask is not None:
            tensor._keras_mask = tf.constant(mask[rows])
        return tf.constant(y[rows]), tensor, None if weight is None else tf.constant(weight[rows])

    parts = [(slice(0, 3), 3), (slice(3, 4), 1), (slice(4, 7), 3), (slice(6, 7), 0)]  # a stand-in
    counts = []
    for rows, count in parts:
        counted = CountedLoss(loss, kind, tf.constant(count))
        counted(*part(rows))
        counts.append(tf.stack([counted.count]))
    total = 0.0
    for (rows, count), share in zip(parts, shares_from_counts(counts)):
        shared = SharedLoss(loss, kind, share[0], tf.constant(count / 7, tf.float64))
        total += shared(*part(rows))
        depends = not kind.summed and (masked or (weighted and kind.weight_mean))
        assert shared.counts_by_data == depends
    assert_close(loss(*part(slice(0, 7))), total)
    assert "call" not in loss.__dict__


def test_a_part_without_rows_counts_nothing():
    kind = term_kinds(built("mse"))[0]
    counted = CountedLoss(keras.losses.MeanSquaredError(), kind, tf.constant(0))
    counted(tf.ones((1, 3)), tf.ones((1, 3)))
    assert float(counted.count) == 0.0


# -- training ----------------------------------------------------------------------------------


def fit_all(models: tuple, x: Any, y: Any, **options: Any) -> None:
    settings = {"batch_size": 5, "shuffle": False, "epochs": 2, "verbose": 0, **options}
    assert_same_history(*[m.fit(x, y, **settings) for m in models])
    assert_same_weights(*models)
    weight = options.get("sample_weight")
    assert_close(*[m.evaluate(x, y, sample_weight=weight, batch_size=5, verbose=0) for m in models])


@float64
@pytest.mark.parametrize("reduction", TRAINED)
def test_reductions_with_weights(reduction):
    models = everywhere()
    for model in models:
        loss = keras.losses.MeanAbsoluteError(reduction=reduction)
        model.compile("sgd", loss, weighted_metrics=["mse"])
    x, y = data(13)
    weight = np.linspace(0, 2, 13)
    weight[5:10] = 0  # a batch without any weight
    weight[7] = 1.0
    fit_all(models, x, y, sample_weight=weight)


def masked_model(outputs: int = 1) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 6))
    x = keras.layers.Masking(0.0)(inputs)
    x = keras.layers.Dense(8, "tanh", name="up")(x)
    heads = [keras.layers.Dense(3, name=n)(x) for n in ("down", "other")[:outputs]]
    return keras.Model(inputs, heads if outputs > 1 else heads[0])


def sequence() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 6))
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))


def masked_data(rows: int = 10) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4, 6))
    for i in range(rows):
        x[i, i % 5 :] = 0  # some rows are masked as a whole
    return x, random.normal(size=(rows, 4, 3))


@float64
@pytest.mark.parametrize("reduction", TRAINED)
def test_masks(reduction):
    models = everywhere(masked_model)
    for model in models:
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction), metrics=["mae"])
    # The last batch is smaller once.
    fit_all(models, *masked_data(13 if reduction == "sum_over_batch_size" else 10))


@float64
def test_masks_and_weights_and_two_terms():
    models = everywhere(lambda: masked_model(2))
    for model in models:
        model.compile("sgd", ["mse", keras.losses.Huber(reduction="sum")], loss_weights=[1.0, 0.1])
    x, y = masked_data()
    weight = np.random.default_rng(1).uniform(size=(10, 4))
    fit_all(models, x, [y, y * 2], sample_weight=[weight, weight])


@float64
def test_a_loss_that_makes_its_own_mask():
    """`ignore_class` masks inside the loss, by the labels."""
    models = everywhere(sequence)
    for model in models:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        model.compile("sgd", loss)
    labels = np.random.default_rng(2).integers(-1, 3, size=(10, 4))
    labels[:4] = -1
    fit_all(models, masked_data()[0], labels)


@float64
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(
            lambda: lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1), id="function"
        ),
        pytest.param(lambda: keras.losses.CosineSimilarity(), id="cosine", marks=long),
        pytest.param(lambda: keras.losses.LogCosh(), id="logcosh", marks=long),
        pytest.param(lambda: "huber", id="name"),
    ],
)
def test_other_losses(loss):
    models = everywhere()
    for model in models:
        model.compile("sgd", loss())
    fit_all(models, *data(13))


def penalised() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(
        8, "tanh", name="up", kernel_regularizer="l2", activity_regularizer="l2"
    )(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="down", bias_regularizer="l1")(hidden))


@float64
def test_regularizers_count_once():
    models = everywhere(penalised)
    for model in models:
        model.compile("sgd", "mse", metrics=["mae"])
    fit_all(models, *data(13))


class MeanLoss(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.abs(inputs)))
        return inputs


class SumLoss(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(keras.ops.abs(inputs)))
        return inputs


class RowLoss(keras.layers.Layer):
    """Its values, one a row, are added up by Keras."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(keras.ops.abs(inputs), axis=-1))
        return inputs


class LossOfEither(keras.layers.Layer):
    """A mean in training and an entry for each row in inference, or the other way round."""

    def __init__(self, rows_in_training: bool) -> None:
        super().__init__()
        self.rows_in_training = rows_in_training

    def call(self, inputs: Any, training: bool = False) -> Any:
        by_row = keras.ops.sum(keras.ops.abs(inputs), axis=-1)
        rows = bool(training) == self.rows_in_training
        self.add_loss(by_row if rows else keras.ops.mean(by_row))
        return inputs


@float64
@pytest.mark.parametrize("evaluated_first", [False, True])
@pytest.mark.parametrize("rows_in_training", [False, True])
def test_losses_of_layers_that_differ_in_training(rows_in_training, evaluated_first):
    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, LossOfEither(rows_in_training)(model.outputs[0]))

    x, y = data(13)
    found = []
    for model in everywhere(build):
        model.compile("sgd", "mse")
        looks = [model.evaluate(x, y, batch_size=5, verbose=0)] if evaluated_first else []
        looks += model.fit(x, y, batch_size=5, shuffle=False, epochs=2, verbose=0).history["loss"]
        found.append([*looks, model.evaluate(x, y, batch_size=5, verbose=0)])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-9)


@float64
@pytest.mark.parametrize(
    "layer, kind, loss",
    [
        (RowLoss, "mean", "mse"),
        (MeanLoss, "mean", None),
        (SumLoss, "sum", "mse"),
        pytest.param(MeanLoss, "mean", "mse", marks=long),
        pytest.param(SumLoss, "sum", None, marks=long),
    ],
)
def test_losses_of_layers(layer, kind, loss):
    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, layer()(model.outputs[0]))

    models = everywhere(build, loss_from_layers=kind)
    for model in models:
        model.compile("sgd", loss)
    x, y = data(13)
    fit_all(models, x, None if loss is None else y)


def test_no_loss_at_all_is_refused():
    parallel = kdist.parallelize(mlp(), kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    parallel.compile("sgd")
    with pytest.raises(ValueError, match=r"(?s)no loss.*compile.*Received: model="):
        parallel.train_on_batch(*data(8))


# -- overridden --------------------------------------------------------------------------------


class Contrastive(keras.Model):
    """A loss over pairs of examples: parts of the batch know nothing of it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        products = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        own = keras.ops.mean(keras.ops.logsumexp(products, axis=1))
        return own + super().compute_loss(x, y, y_pred, sample_weight, training)


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "spread": keras.ops.max(y_pred) - keras.ops.min(y_pred)}


def subclass_of(kind: type, build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = build()
        return kind(model.inputs, model.outputs[0])

    return make


@float64
@pytest.mark.parametrize(
    "kind, build",
    [
        (Contrastive, penalised),
        (OwnMetrics, penalised),
        pytest.param(Contrastive, mlp, marks=long),
        pytest.param(OwnMetrics, mlp, marks=long),
    ],
)
def test_overridden_loss_and_metrics(kind, build):
    models = everywhere(subclass_of(kind, build))
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    fit_all(models, *data(13), sample_weight=np.linspace(0.1, 1, 13))


@float64
@pytest.mark.parametrize("kind", [keras.Model, Contrastive])
@pytest.mark.parametrize(
    "layer, combine",
    [(SumLoss, "sum"), (RowLoss, "mean"), pytest.param(MeanLoss, "mean", marks=long)],
)
def test_losses_of_layers_with_fewer_rows_than_replicas(layer, combine, kind):
    """A replica without rows computes on a stand-in, whose sum must not count."""
    models = everywhere(
        subclass_of(kind, lambda: keras.Sequential([mlp(), layer()])), loss_from_layers=combine
    )
    for model in models:
        model.compile("sgd", "mse")
    for rows in (3, 1):
        x, y = data(rows)
        assert_close(*[m.train_on_batch(x, y) for m in models])
        assert_close(*[m.test_on_batch(x, y) for m in models])
    assert_same_weights(*models)


@float64
def test_overridden_loss_sees_masks():
    models = everywhere(subclass_of(OwnMetrics, masked_model))
    for model in models:
        model.compile("sgd", "mse", metrics=["mae"])
    fit_all(models, *masked_data())
