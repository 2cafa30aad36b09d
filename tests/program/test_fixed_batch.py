"""Models for batches of one size: exact where a slice has the whole batch, refused elsewhere."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

ROWS, WIDTH = 8, 6


def fixed() -> keras.Model:
    x = inputs = keras.Input(batch_shape=(ROWS, WIDTH), name="rows")
    x = keras.layers.Dense(WIDTH, "tanh", name="first")(x)
    x = keras.ops.reshape(keras.ops.reshape(x, (ROWS, 3, 2)), (ROWS, WIDTH))
    return keras.Model(inputs, keras.layers.Dense(4, name="second")(x), name="fixed")


def stateful() -> keras.Model:
    x = inputs = keras.Input(batch_shape=(ROWS, 5, WIDTH))
    x = keras.layers.Bidirectional(keras.layers.LSTM(4, stateful=True, name="memory"))(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="second")(x), name="stateful")


def parallel(whole: keras.Model, **axes: int) -> keras.Model:
    options: dict[str, Any] = {}
    if "pipe" in axes:
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    if "model" in axes:
        options["layout_map"] = {"second/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options)
    return kdist.parallelize(whole, config)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(3 * ROWS, WIDTH)), rng.normal(size=(3 * ROWS, 4))


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        ({"data": 2}, "2 replicas compute"),
        ({"data": 2, "model": 2}, "2 replicas compute"),
        ({"pipe": 2}, "1 replicas of 2 micro-batches each compute"),
        ({"pipe": 2, "data": 2}, "2 replicas of 2 micro-batches each compute"),
    ],
)
def test_a_batch_size_that_replicas_do_not_have_is_refused(axes: Any, parts: str) -> None:
    model = fixed()
    with pytest.raises(
        ValueError, match=rf"size of 8 rows.*{parts}.*Received: input 'rows.*\(8, 6"
    ):
        parallel(model, **axes)
    model.compile("sgd", "mse")  # it is as it was
    model.train_on_batch(*(array[:ROWS] for array in data()))


def test_a_batch_size_that_every_slice_has_is_kept(float64: None) -> None:
    losses = []
    for axes in ({}, {"model": 2}):
        keras.utils.set_random_seed(0)
        model = parallel(fixed(), **axes) if axes else fixed()
        model.compile("sgd", "mse")
        log = model.fit(*data(), batch_size=ROWS, shuffle=False, epochs=2, verbose=0)
        losses.append(log.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-9)


def test_the_size_of_a_first_batch_is_no_promise(float64: None) -> None:
    losses = []
    for axes in ({}, {"data": 2}):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(4)])
        model(np.zeros((1, WIDTH)))
        if axes:
            parallel(model, **axes)
        model.compile("sgd", "mse")
        log = model.fit(*data(), batch_size=7, shuffle=False, verbose=0)
        losses.append(log.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-9)


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"model": 2}, {"pipe": 2}])
def test_a_state_of_rows_is_refused(axes: Any) -> None:
    with pytest.raises(ValueError, match=r"stateful RNN keeps.*Received: layer '\w*memory'"):
        parallel(stateful(), **axes)


def test_a_state_of_rows_is_refused_before_the_model_is_built() -> None:
    model = keras.Sequential([keras.layers.GRU(4, stateful=True), keras.layers.Dense(4)])
    with pytest.raises(ValueError, match="stateful RNN keeps"):
        parallel(model, data=2)
