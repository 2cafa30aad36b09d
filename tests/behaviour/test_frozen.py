"""Layers that are frozen, or thawed, between a model's first use and its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.usefixtures("float64")

MESHES: dict[str, dict[str, int]] = {
    "data2": {"data": 2},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(24, 6)), rng.normal(size=(24, 2))


def made(mesh: str | None, level: int = 0) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(4, activation="tanh", name="a"),
        keras.layers.Dense(8, activation="tanh", name="b"),
        keras.layers.Dense(2, name="c"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    if mesh is None:
        return model
    layout_map = {".*b/kernel": (None, "model")} if "model" in MESHES[mesh] else {}
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**MESHES[mesh]),
        layout_map=layout_map,
        optimizer=optimizer,
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in MESHES[mesh] else None,
    )
    return kdist.parallelize(model, config)


def train(model: keras.Model) -> list[float]:
    fit = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return list(fit.history["loss"])


def freeze(model: keras.Model, name: str = "a", trainable: bool = False) -> None:
    model.get_layer(name).trainable = trainable


def predicted_then_frozen(model: keras.Model) -> list[float]:
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.predict(X[:8], verbose=0)
    freeze(model)
    return train(model)


def evaluated_then_frozen(model: keras.Model) -> list[float]:
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.evaluate(X[:8], Y[:8], verbose=0)
    freeze(model)
    return train(model)


def predicted_then_thawed(model: keras.Model) -> list[float]:
    freeze(model)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.predict(X[:8], verbose=0)
    freeze(model, trainable=True)
    return train(model)


def same_optimizer_after_freezing(model: keras.Model) -> list[float]:
    model.compile(keras.optimizers.Adam(0.1), "mse")
    train(model)
    freeze(model)
    model.compile(model.optimizer, "mae")
    losses = train(model)
    freeze(model, trainable=True)
    model.compile(model.optimizer, "mse")  # which has kept the state of what was frozen
    return losses + train(model)


def frozen_without_compile(model: keras.Model) -> list[float]:
    """`fit` hears of it by `compile`."""
    model.compile(keras.optimizers.Adam(0.1), "mse")
    losses = train(model)
    freeze(model)
    if isinstance(model, keras.Model) and hasattr(model, "plan"):
        model.plan().summary()
    return losses + train(model)


ROWS: list[Callable[[keras.Model], list[float]]] = [
    predicted_then_frozen,
    evaluated_then_frozen,
    predicted_then_thawed,
    same_optimizer_after_freezing,
    frozen_without_compile,
]


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("row", ROWS)
def test_trains_what_one_device_trains(row: Any, mesh: str, level: int) -> None:
    plain, model = made(None), made(mesh, level)
    np.testing.assert_allclose(row(model), row(plain), rtol=1e-9)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_follows_at_once(mesh: str, level: int, graph: bool) -> None:
    """In a graph, when that is traced again."""
    model = made(mesh, level)
    model.compile(keras.optimizers.Adam(0.1), "mse")

    def step() -> int:
        _, gradients = kdist.gradients(model, X, Y)
        kdist.apply_gradients(model, gradients)
        return len(gradients)

    def stepped() -> int:
        return int(tf.function(step)() if graph else step())

    assert stepped() == 6
    freeze(model)
    before = [np.array(w) for w in model.get_weights()]
    assert stepped() == len(model.trainable_variables) == 4
    changed = [bool((a != b).any()) for a, b in zip(before, model.get_weights(), strict=True)]
    assert changed == [False] * 2 + [True] * 4


@pytest.mark.parametrize(("mesh", "level"), [("data2", 3), ("pipe2_data2", 0)])
def test_what_runs_eagerly_follows_step_by_step(mesh: str, level: int) -> None:
    """As Keras, which asks what is trainable in each step then; traced steps wait for `compile`."""

    def trained(on: str | None) -> tuple[list[float], list[np.ndarray]]:
        model = made(on, level)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
        losses = train(model)
        freeze(model, "c")
        losses += train(model)

        def frozen(batch: int, logs: Any) -> None:
            if batch == 1:
                freeze(model)

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=frozen)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
        return losses, model.get_weights()

    (losses, weights), (expected, its_weights) = trained(mesh), trained(None)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for one, other in zip(weights, its_weights):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer, first = keras.optimizers.Adam(0.1), made("data2")
    first.compile(optimizer, "mse")
    train(first)
    second = made("data2")
    second.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"built for other variables.*new optimizer.*a/kernel"):
        train(second)


def test_an_optimizer_is_refused_for_what_was_thawed_since() -> None:
    model = made("data2")
    freeze(model)
    optimizer = keras.optimizers.Adam(0.1)
    model.compile(optimizer, "mse")
    train(model)
    freeze(model, trainable=True)
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"built for other variables.*a/kernel.*a/bias"):
        train(model)
