"""Vocabularies, and numbers that are no variables, come back with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

SAVED, OTHER = ["red", "green", "blue"], ["one", "two", "three"]
WORDS = tf.constant([["red", "blue", "black"], ["green", "red", "red"]])


@keras.saving.register_keras_serializable("kdist_tests")
class Scaled(keras.layers.Layer):
    """Multiplies by a number that is no variable."""

    factor = 1.0

    def call(self, x: Any) -> Any:
        return x * self.factor

    def save_own_variables(self, store: Any) -> None:
        store["factor"] = np.array(self.factor)

    def load_own_variables(self, store: Any) -> None:
        self.factor = float(np.array(store["factor"]))


@keras.saving.register_keras_serializable("kdist_tests")
class Mixed(Scaled):
    """Has a variable, too."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(), name="shift")

    def save_own_variables(self, store: Any) -> None:
        store["shift"] = self.shift
        super().save_own_variables(store)


def adapted(words: list[str], factor: float, scaled: type[Scaled] = Scaled) -> keras.Model:
    keras.utils.set_random_seed(len(words))
    text = keras.Input((3,), dtype="string")
    look_up = keras.layers.StringLookup()
    look_up.adapt(np.array([words]))
    weighted = keras.layers.TextVectorization(output_mode="tf_idf", name="weighted")
    weighted.adapt(np.array([f"{words[0]} {words[1]}", words[2], words[0]]))
    x = keras.layers.Embedding(8, 4, name="table")(look_up(text))
    y = keras.layers.Dense(4)(weighted(text[:, :1]))
    layer = scaled(name="scaled")
    layer.factor = factor
    x = layer(keras.layers.Add()([keras.layers.GlobalAveragePooling1D()(x), y]))
    return keras.Model(text, keras.layers.Dense(3, name="head")(x))


def trained(model: keras.Model, parallel: bool) -> keras.Model:
    if parallel:
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd", "mse")
    model.fit(WORDS, np.ones((2, 3)), verbose=0)
    model.predict(WORDS, verbose=0)
    return model


@pytest.mark.parametrize("parallel", [True, False])
def test_what_layers_keep_comes_back(parallel: bool, tmp_path: Path) -> None:
    """The other model has been traced with words of its own."""
    first = trained(adapted(SAVED, 2.0), parallel=not parallel)
    kdist.checkpoint.save(first, tmp_path)
    model = trained(adapted(OTHER, 3.0), parallel)
    kdist.checkpoint.restore(model, tmp_path)
    names = [one for one in model.layers if hasattr(one, "get_vocabulary")]
    assert all(set(SAVED) <= set(one.get_vocabulary()) for one in names) and len(names) == 2
    expected = first.predict(WORDS, verbose=0)
    np.testing.assert_allclose(model.predict(WORDS, verbose=0), expected, rtol=1e-6)
    for one in (first, model):
        one.fit(WORDS, np.ones((2, 3)), verbose=0)
    expected = first.predict(WORDS, verbose=0)
    np.testing.assert_allclose(model.predict(WORDS, verbose=0), expected, rtol=1e-5)


def test_steps_stay_where_nothing_is_other(tmp_path: Path) -> None:
    model = trained(adapted(SAVED, 2.0), parallel=True)
    kdist.checkpoint.save(model, tmp_path)
    function = model.train_function
    kdist.checkpoint.restore(model, tmp_path)
    assert model.train_function is function


def test_what_cannot_come_back_is_named(tmp_path: Path) -> None:
    first = adapted(SAVED, 2.0, Mixed)
    kdist.checkpoint.save(first, tmp_path)
    with pytest.warns(UserWarning, match=r"layer='scaled', not restored=\['factor'\]"):
        kdist.checkpoint.restore(adapted(SAVED, 3.0, Mixed), tmp_path)


def test_a_run_that_is_resumed_goes_on_with_them(tmp_path: Path) -> None:
    def fit(words: list[str], factor: float, epochs: int, folder: Path) -> Any:
        model = adapted(words, factor)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        model.compile("sgd", "mse")
        saver = kdist.callbacks.ShardedCheckpoint(folder, every_steps=1, resume=True)
        y = np.ones((2, 3))
        return model.fit(WORDS, y, epochs=epochs, callbacks=[saver], verbose=0).history["loss"]

    whole = fit(SAVED, 2.0, 3, tmp_path / "whole")
    fit(SAVED, 2.0, 1, tmp_path / "broken")
    np.testing.assert_allclose(fit(OTHER, 3.0, 3, tmp_path / "broken"), whole, rtol=1e-5)
