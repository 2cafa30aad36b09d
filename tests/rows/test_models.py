"""Where rows meet in models is found by layer and operation; where they do not, nothing is."""

from collections.abc import Callable
from typing import Any

from kdist.rows.model import study_model
from kdist.rows.model_study import ModelStudy

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .models import Own, X, balance, beside, mixup, model_of, nt_xent


def studied(model: keras.Model, x: Any = X, training: bool = True, **options: Any) -> ModelStudy:
    return study_model(model, x, training, options.get("loss_from_layers", "mean"))


MEETING: dict[str, tuple[Callable, str, str]] = {
    "NT-Xent": (nt_xent, "a value given to add_loss mixes rows", "MatMul"),
    "deviation as a loss": (
        beside(lambda layer, x: layer.add_loss(ops.mean(ops.std(x, axis=0)))),
        "a value given to add_loss mixes rows",
        "Mean, then Sub",
    ),
    "mixup": (mixup, "output 'head' mixes rows", "Roll"),
    "shuffled": (
        lambda layer, x: x + tf.random.shuffle(x),
        "output 'head' mixes rows",
        "RandomShuffle",
    ),
    "centred": (
        lambda layer, x: x - ops.mean(x, axis=0, keepdims=True),
        "output 'head' mixes rows",
        "Mean, then Sub",
    ),
    "load balance": (balance, "a value given to add_loss mixes rows", "Mean, then Mul"),
    "masked mean as a loss": (
        beside(
            lambda layer, x: layer.add_loss(
                ops.sum(ops.where(x > 0, x, 0.0)) / ops.sum(ops.cast(x > 0, "float32"))
            )
        ),
        "a value given to add_loss mixes rows",
        "Sum, then RealDiv",
    ),
    "sum as a loss": (
        beside(lambda layer, x: layer.add_loss(ops.sum(x * x))),
        'a value given to add_loss is a sum over rows, which loss_from_layers="sum" is for',
        "Sum",
    ),
    "values per row and a mean as losses": (
        beside(
            lambda layer, x: (
                layer.add_loss(ops.sum(x * x, axis=1)),
                layer.add_loss(ops.mean(x)),
            )
        ),
        'a value given to add_loss is a sum over rows, which loss_from_layers="sum" is for',
        "Sum",
    ),
    "entries of rows that meet as a loss": (
        beside(lambda layer, x: layer.add_loss(ops.sum(ops.matmul(x, ops.transpose(x)), axis=1))),
        "a value given to add_loss has an entry for each row, in which others may meet",
        "MatMul",
    ),
    "deviation as state": (
        beside(lambda layer, x: layer.average.assign(ops.std(x, axis=0))),
        "state 'own/average' is no mean over rows",
        "Mean, then Sub",
    ),
    "sum as state": (
        beside(lambda layer, x: layer.average.assign_add(ops.sum(x, axis=0))),
        "state 'own/average' is no mean over rows",
        "Sum, then AddV2",
    ),
    "count of positives": (
        beside(lambda layer, x: layer.seen.assign_add(ops.sum(ops.cast(x > 0, "int32")))),
        "state 'own/seen' counts what is in the rows",
        "Sum, then AddV2",
    ),
    "mean over batches": (
        beside(lambda layer, x: layer.metric.update_state(ops.mean(x))),
        "state 'own/metric/count' is a metric to which not every row adds its own part",
        "",
    ),
}


@pytest.mark.parametrize(("function", "what", "operation"), MEETING.values(), ids=MEETING.keys())
def test_where_rows_meet_is_told_by_layer_and_operation(
    function: Callable, what: str, operation: str
) -> None:
    found = [str(finding) for finding in studied(model_of(function)).findings]
    where = f" ({operation} in layer 'own')" if operation else ""
    assert f"{what}{where}" in found


def test_a_count_of_rows_is_told() -> None:
    model = model_of(beside(lambda layer, x: layer.seen.assign_add(ops.shape(x)[0])))
    assert [str(f) for f in studied(model).findings] == ["state 'own/seen' counts rows"]


@pytest.mark.parametrize(
    "function",
    [lambda layer, x: ops.mean(x, axis=0), lambda layer, x: ops.sum(x), lambda layer, x: x[0]],
    ids=["mean", "sum", "first row"],
)
def test_outputs_without_a_batch_dim_are_told(function: Callable) -> None:
    (finding,) = studied(model_of(function, head=False)).findings
    assert finding.what == "output 'own'" and finding.where.layer == "own"


APART: dict[str, Callable] = {
    "nothing": lambda layer, x: x,
    "mean as a loss": beside(lambda layer, x: layer.add_loss(0.1 * ops.mean(ops.square(x)))),
    "sum by the size as a loss": beside(
        lambda layer, x: layer.add_loss(ops.sum(x * x) / ops.cast(ops.shape(x)[0], x.dtype))
    ),
    "one value per row as a loss": beside(lambda layer, x: layer.add_loss(ops.sum(x * x, axis=1))),
    "values of parts of rows as a loss": beside(
        lambda layer, x: layer.add_loss(ops.reshape(x * x, (-1,)))
    ),
    "parts of a mean as a loss": beside(
        lambda layer, x: layer.add_loss(ops.abs(x) / ops.cast(ops.shape(x)[0], x.dtype))
    ),
    "penalty of weights": beside(
        lambda layer, x: layer.add_loss(ops.sum(ops.square(layer.average)))
    ),
    "count of steps": beside(lambda layer, x: layer.seen.assign_add(1)),
    "moving mean": beside(
        lambda layer, x: layer.average.assign(0.9 * layer.average + 0.1 * ops.mean(x, axis=0))
    ),
    "metric of every row": beside(lambda layer, x: layer.metric.update_state(ops.sum(x, axis=1))),
    "noise": lambda layer, x: x + keras.random.normal(ops.shape(x), seed=3),
}


@pytest.mark.parametrize("function", APART.values(), ids=APART.keys())
def test_what_equals_one_device_is_not_told(function: Callable) -> None:
    study = studied(model_of(function))
    assert (study.lines(), study.warning()) == ([], "")


SEQUENCE, IMAGE = (6, 4), (8, 8, 3)
LAYERS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "RandomFlip": (layers.RandomFlip, IMAGE),
    "RandomRotation": (lambda: layers.RandomRotation(0.1), IMAGE),
    "RandomContrast": (lambda: layers.RandomContrast(0.1), IMAGE),
    "RandomErasing": (layers.RandomErasing, IMAGE),
    "AlphaDropout": (lambda: layers.AlphaDropout(0.5), SEQUENCE),
    "SpatialDropout1D": (lambda: layers.SpatialDropout1D(0.5), SEQUENCE),
    "GroupNormalization": (lambda: layers.GroupNormalization(1), IMAGE),
    "SpectralNormalization": (lambda: layers.SpectralNormalization(layers.Dense(3)), (6,)),
    "dilated DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3, dilation_rate=2), IMAGE),
    "Conv2D in groups": (lambda: layers.Conv2D(3, 3, groups=3), IMAGE),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(3, 3), IMAGE),
    "causal Conv1D": (lambda: layers.Conv1D(3, 3, padding="causal"), SEQUENCE),
    "ConvLSTM2D": (lambda: layers.ConvLSTM2D(3, 3), (2, *IMAGE)),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Conv2D(3, 3)), (2, *IMAGE)),
    "Bidirectional": (lambda: layers.Bidirectional(layers.GRU(3)), SEQUENCE),
    "stacked cells": (
        lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)])),
        SEQUENCE,
    ),
    "Discretization": (lambda: layers.Discretization([0.0, 1.0]), (6,)),
    "recomputed": (
        lambda: layers.Lambda(lambda x: keras.remat(lambda t: ops.tanh(t) * t)(x)),
        SEQUENCE,
    ),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_layers_that_keep_rows_apart_are_silent(layer: Callable, shape: tuple[int, ...]) -> None:
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer()(inputs))
    assert studied(model, np.zeros((4, *shape), "float32")).lines() == []


@pytest.mark.parametrize("layer", [layers.MixUp, layers.CutMix], ids=["MixUp", "CutMix"])
def test_keras_layers_that_mix_rows_are_told(layer: Callable) -> None:
    inputs = keras.Input(IMAGE)
    model = keras.Model(inputs, layer(name="mixing")(inputs))
    (finding,) = studied(model, np.zeros((4, *IMAGE), "float32")).findings
    assert str(finding) == "output 'mixing' mixes rows (GatherV2 in layer 'mixing')"


def test_sums_are_right_where_layers_give_sums() -> None:
    total = model_of(beside(lambda layer, x: layer.add_loss(ops.sum(x * x))))
    mean = model_of(beside(lambda layer, x: layer.add_loss(ops.mean(x * x))))
    # The activity regularizer of `before` is a mean.
    assert [f.where.layer for f in studied(total, loss_from_layers="sum").findings] == ["before"]
    found = studied(mean, loss_from_layers="sum").findings
    assert ["adds it replica by replica" in f.why for f in found] == [True, True]


def test_layers_behind_batch_normalization_are_seen() -> None:
    inputs = keras.Input((6,))
    x = layers.BatchNormalization(name="norm")(layers.Dense(4)(inputs))
    x = Own(mixup, name="own")(x)
    study = studied(keras.Model(inputs, x))
    assert study.statistics == ("norm",)
    assert [str(f) for f in study.findings] == ["output 'own' mixes rows (Roll in layer 'own')"]
    frozen = studied(keras.Model(inputs, layers.BatchNormalization(trainable=False)(inputs)))
    assert frozen.lines() == []


def test_layers_of_texts_and_crossings_keep_rows() -> None:
    text, kind = (keras.Input((1,), dtype="string", name=name) for name in ("text", "kind"))
    words = layers.TextVectorization(output_sequence_length=4, vocabulary=["red", "blue"])(text)
    known = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(kind)
    hashed = layers.Hashing(5)(kind)
    crossed = layers.HashedCrossing(5, output_mode="one_hot")((kind, text))
    given = [ops.cast(one, "float32") for one in (words, known, hashed, crossed)]
    x = layers.Dense(4)(layers.Concatenate()(given))
    data = {"text": tf.constant([["red blue"], ["b"]]), "kind": tf.constant([["a"], ["c"]])}
    inputs = {"text": text, "kind": kind}
    assert studied(keras.Model(inputs, x), data).lines() == []
    mixing = studied(keras.Model(inputs, Own(mixup, name="own")(x)), data)
    assert [str(f) for f in mixing.findings] == ["output 'own' mixes rows (Roll in layer 'own')"]
    before = layers.Lambda(lambda t: tf.reverse(t, [0]), (1,), name="before")(text)
    crossed = layers.HashedCrossing(5, output_mode="one_hot")((kind, before))
    (found,) = studied(keras.Model(inputs, layers.Dense(4)(crossed)), data).findings
    assert "ReverseV2 in layer 'before'" in str(found)


def test_a_shared_layer_in_a_loop_is_seen() -> None:
    class Cell(layers.Layer):
        state_size = 4

        def call(self, x: Any, states: Any, training: bool = False) -> Any:
            after = states[0] + x - ops.mean(x, axis=0)
            return after, [after]

    inputs = keras.Input((3, 4))
    study = studied(
        keras.Model(inputs, layers.RNN(Cell(name="cell"), name="rnn")(inputs)), X.reshape(4, 3, 4)
    )
    (finding,) = study.findings
    assert str(finding.where) == "Mean, then Sub in layer 'rnn'"
    assert study.mixings == (finding.where,)


def test_subclassed_models_and_dicts() -> None:
    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="two")
            self.up = layers.Dense(4)

        def call(self, x: Any) -> Any:
            return {"a": self.up(x["a"]), "b": ops.softmax(self.up(x["b"]), axis=0)}

    model = Two()
    model({"a": X, "b": X})
    (finding,) = studied(model, {"a": X, "b": X}).findings
    assert str(finding).startswith("output 'b' mixes rows (")


def test_a_static_batch_size() -> None:
    inputs = keras.Input(batch_shape=(4, 3))
    rolled = layers.Lambda(lambda x: ops.roll(x, 1, axis=0), name="rolled")
    study = studied(keras.Model(inputs, rolled(inputs)), np.zeros((4, 3), "float32"))
    assert "output 'rolled' mixes rows" in str(study.findings[0])


def test_state_that_the_model_does_not_list() -> None:
    inputs = keras.Input(batch_shape=(4, 5, 3))
    rnn = layers.LSTM(4, stateful=True, name="lstm")
    study = studied(keras.Model(inputs, rnn(inputs)), np.zeros((4, 5, 3), "float32"))
    assert "does not list" in study.failed


# In training ------------------------------------------------------------------------------------
