"""What a callback does to a model, and to others that have its weights, while `fit` goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest

from ..parity import assert_close, assert_same_weights, config, data, mlp

pytestmark = pytest.mark.usefixtures("float64")
LEVELS = [(0, 3), (3, 0)]


def parallel(model: keras.Model, level: int) -> keras.Model:
    levels = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    return kdist.parallelize(model, config({"data": 4}, optimizer=levels))


def fit(model: keras.Model, at_end: Callable[[int], Any], epochs: int = 3) -> list[float]:
    """Trains, with something to do at the end of each epoch; the losses."""
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: at_end(epoch))
    history = model.fit(*data(8), epochs=epochs, verbose=0, callbacks=[callback])
    return list(history.history["loss"])


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def test_random_numbers_without_a_seed_and_an_evaluation() -> None:
    """Steps are made anew then, for what they may draw."""
    keras.utils.clear_session()
    plain, other = compiled(mlp()), compiled(parallel(mlp(), 0))
    found = []
    for model in (plain, other):
        keras.utils.clear_session()

        def look(epoch: int, model: keras.Model = model) -> None:
            keras.random.normal((2,))
            found.append(model.evaluate(*data(8), verbose=0))

        found.extend(fit(model, look))
    assert_close(found[:6], found[6:])
    assert_same_weights(plain, other)


def heads(levels: tuple[int, int] | None) -> tuple[keras.Model, list[keras.Model]]:
    """A base, and two heads over it."""
    base, inputs = mlp(), keras.Input((6,))
    models = [keras.Model(inputs, keras.layers.Dense(3, name=n)(base(inputs))) for n in "ab"]
    if levels is not None:
        models = [parallel(model, level) for model, level in zip(models, levels, strict=True)]
    return base, models


def trained_by_another(levels: tuple[int, int] | None, evaluates: bool) -> list[Any]:
    """Of a head whose frozen base another head trains, after each epoch: losses and weights."""
    base, (first, second) = heads(levels)
    found: list[Any] = []

    def other(epoch: int) -> None:
        base.trainable = True
        if epoch == 0:
            compiled(second)
        found.append(second.train_on_batch(*data(8)))
        base.trainable = False
        if evaluates:
            found.append(first.evaluate(*data(8), verbose=0))

    base.trainable = False
    found += fit(compiled(first), other)
    return [np.asarray(found), *first.get_weights(), *second.get_weights()]


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("levels", LEVELS)
def test_another_model_moves_what_is_frozen_here(levels: tuple[int, int], evaluates: bool) -> None:
    assert_close(trained_by_another(levels, evaluates), trained_by_another(None, evaluates))


@pytest.mark.parametrize("levels", LEVELS)
def test_another_model_that_moves_what_trains_here_is_told(levels: tuple[int, int]) -> None:
    _, (first, second) = heads(levels)
    with pytest.raises(ValueError, match="Another model that has the same weights was compiled"):
        fit(compiled(first), lambda epoch: compiled(second))


def test_a_model_around_this_one_is_compiled() -> None:
    found = []
    for over_mesh in (False, True):
        inner, inputs = mlp(), keras.Input((6,))
        around = keras.Model(inputs, keras.layers.Dense(3)(inner(inputs)))
        if over_mesh:
            inner, around = parallel(inner, 3), parallel(around, 3)

        def other(epoch: int, inner: keras.Model = inner, around: keras.Model = around) -> None:
            inner.trainable = False
            compiled(around)
            found.append(around.train_on_batch(*data(8)))
            inner.trainable = True

        found.extend(fit(compiled(inner), other))
    assert_close(found[:6], found[6:])


class Noise(keras.layers.Layer):
    """Adds random numbers without a seed, once it is told to."""

    draws = False

    def call(self, x: Any) -> Any:
        return x + keras.random.normal((3,), dtype=x.dtype) if self.draws else x


def test_a_function_that_the_user_has_forgotten_draws_where_keras_is() -> None:
    found = []
    for over_mesh in (False, True):
        inputs, noise = keras.Input((6,)), Noise()
        model = keras.Model(inputs, noise(keras.layers.Dense(3)(inputs)))
        model = compiled(parallel(model, 0) if over_mesh else model)
        keras.utils.clear_session()
        keras.utils.set_random_seed(2)
        model.train_on_batch(*data(8))
        found.append(keras.random.normal((2,)))
        noise.draws, model.train_function = True, None
        model.train_on_batch(*data(8))
        found.append(keras.random.normal((2,)))
    assert_close(found[:2], found[2:])
