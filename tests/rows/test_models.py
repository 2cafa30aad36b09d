"""Models in which rows meet warn by layer and operation; models in which they do not are silent."""

import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist.rows.model import ModelStudy, study_model

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


class Own(layers.Layer):
    """A layer with a state of its own that runs a given function."""

    def __init__(self, function: Callable, **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def build(self, input_shape: Any) -> None:
        self.seen = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen"
        )
        self.average = self.add_weight(
            shape=input_shape[1:], initializer="zeros", trainable=False, name="average"
        )
        self.metric = keras.metrics.Mean(name="metric")

    def call(self, inputs: Any) -> Any:
        return self.function(self, inputs)


def model_of(function: Callable, head: bool = True) -> keras.Model:
    inputs = keras.Input((6,), name="features")
    x = layers.Dense(4, activation="tanh", activity_regularizer="l2", name="before")(inputs)
    x = Own(function, name="own")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(x) if head else x, name="net")


def studied(model: keras.Model, x: Any = X, training: bool = True, **options: Any) -> ModelStudy:
    return study_model(model, x, training, options.get("loss_from_layers", "mean"))


def beside(function: Callable) -> Callable:
    """Does something and returns the inputs as they are."""

    def run(layer: Own, x: Any) -> Any:
        function(layer, x)
        return x

    return run


@beside
def nt_xent(layer: Own, x: Any) -> None:
    first, second = ops.split(ops.normalize(x, axis=-1), 2, axis=1)
    scores = ops.matmul(first, ops.transpose(second))
    layer.add_loss(ops.mean(ops.logsumexp(scores, axis=1) - ops.diagonal(scores)))


@beside
def balance(layer: Own, x: Any) -> None:
    chances = ops.softmax(x)
    chosen = ops.one_hot(ops.argmax(chances, axis=-1), 4)
    layer.add_loss(ops.sum(ops.mean(chosen, axis=0) * ops.mean(chances, axis=0)))


def mixup(layer: Own, x: Any) -> Any:
    return 0.7 * x + 0.3 * ops.roll(x, 1, axis=0)


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
    "one value per row as a loss": (
        beside(lambda layer, x: layer.add_loss(ops.sum(x * x, axis=1))),
        'a value given to add_loss is a sum over rows, which loss_from_layers="sum" is for',
        "Sum",
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
    assert str(finding).startswith("output 1 mixes rows (")


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


def parallel(function: Callable, **axes: int) -> keras.Model:
    config = kdist.ParallelConfig(mesh=kdist.mesh(**(axes or {"data": 2})))
    model = kdist.parallelize(model_of(function), config)
    model.compile("sgd", "mse")
    return model


def warned(run: Callable[[], Any]) -> list[str]:
    """What was warned of rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if " rows" in str(w.message)]


def test_training_warns_once_and_inspect_lists_all() -> None:
    def two(layer: Own, x: Any) -> Any:
        balance(layer, x)
        return mixup(layer, x)

    model = parallel(two)
    (text,) = warned(lambda: model.train_on_batch(X, X[:, :3]))
    assert text.startswith("net: Computed on each replica's rows, and so not as on one device: ")
    assert "output 'head' mixes rows (Roll in layer 'own')" in text
    assert "add_loss mixes rows (Mean, then Mul in layer 'own')" in text
    assert 'set ParallelConfig(batch_semantics="global")' in text
    model.compile("sgd", "mse")
    assert warned(lambda: model.fit(X, X[:, :3], verbose=0, validation_split=0.5)) == []
    inspection = kdist.inspect(model)
    lines = [f"on each replica's rows: {finding}" for finding in inspection.rows.findings]
    assert len(lines) == 2
    assert set(lines) <= set(str(inspection).splitlines())


def sequential(function: Callable) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, name="before"), Own(function), layers.Dense(3)]
    )


class Called(keras.Model):
    """A model whose inputs are not known before it is called."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.parts = [layers.Dense(4, name="before"), Own(function), layers.Dense(3)]

    def build(self, input_shape: Any) -> None:
        self.parts[0].build(input_shape)
        for part in self.parts[1:]:
            part.build((None, 4))
        self.built = True

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("build", [sequential, Called])
def test_who_looks_before_the_first_batch_is_told_at_it(build: Callable) -> None:
    model = build(lambda layer, x: x - ops.mean(x, axis=0))
    model.build((None, 6))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd", "mse")
    told = warned(lambda: kdist.inspect(model))
    told += warned(lambda: model.train_on_batch(X, X[:, :3]))
    (message,) = told
    assert "mixes rows (Mean, then Sub in layer" in message
    assert len(kdist.inspect(model).rows.findings) == 1


def test_prediction_alone_warns_too() -> None:
    (text,) = warned(lambda: parallel(mixup).predict(X, verbose=0))
    assert "Roll in layer 'own'" in text


def test_one_replica_has_nothing_to_warn_of() -> None:
    model = parallel(mixup, model=2)
    assert warned(lambda: model.train_on_batch(X, X[:, :3])) == []
    assert kdist.inspect(model).rows == ModelStudy()


def test_a_model_that_cannot_be_looked_at_trains_and_says_so() -> None:
    @beside
    def picky(layer: Own, x: Any) -> None:
        if x.shape[0] is not None and x.shape[0] > 400:
            raise ValueError("too many")

    model = parallel(picky)
    (text,) = warned(lambda: model.train_on_batch(X, X[:, :3]))
    assert "could not be found out" in text and "too many" in text
    assert "too many" in str(kdist.inspect(model))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_state_that_changes_with_each_micro_batch_is_told(micro_batches: int) -> None:
    inputs = keras.Input((6,))
    x = layers.SpectralNormalization(layers.Dense(4), name="spectral")(inputs)
    x = layers.BatchNormalization(name="norm")(layers.Dropout(0.5, name="drop")(x))
    model = keras.Model(inputs, layers.Dense(3)(x))
    pipeline = kdist.PipelineConfig(micro_batches=micro_batches)
    model = kdist.parallelize(
        model, kdist.ParallelConfig(mesh=kdist.mesh(pipe=2), pipeline=pipeline)
    )
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict(X, verbose=0)
        model.train_on_batch(X, X[:, :3])
    told = [str(w.message) for w in caught if "changes" in str(w.message)]
    assert len(told) == (micro_batches > 1)
    for text in told:
        assert "changes 2 times a step" in text and "micro_batches=1" in text
        assert "spectral" in text and "norm/" not in text and "drop" not in text
