"""What is told of models in which rows meet: when, and how often."""

import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist.rows.model_study import ModelStudy

import keras
import pytest
from keras import layers, ops

from .models import Own, X, balance, beside, mixup, model_of


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
