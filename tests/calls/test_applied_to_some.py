"""The compiled optimizer of a step of one's own that trains a part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .step_parts import CUTS

pytestmark = pytest.mark.usefixtures("float64")

PLACES: dict[str, tuple[dict[str, int], int]] = {
    "data 4": ({"data": 4}, 0),
    "data 2 x model 2, level 3": ({"data": 2, "model": 2}, 3),
}


class Following(keras.Model):
    """Trains its first layer; the last one follows the second, as a teacher does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            far = ops.mean((self(x, training=True) - y) ** 2)
            loss = self.optimizer.scale_loss(far) if self.scales else far
        _, up, down, teacher, *_ = self.layers
        weights = up.trainable_weights
        found = list(zip(tape.gradient(loss, weights), weights))
        for pairs in [[one] for one in found] if self.one_by_one else [found]:
            self.optimizer.apply_gradients(pairs)
        for old, new in zip(teacher.weights, down.weights):
            old.assign(0.9 * old + 0.1 * new)
        return {"far": far}


def following(place: str, optimizer: Any, one_by_one: bool = False) -> keras.Model:
    """Such a model, compiled; "" for none of the meshes."""
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    hidden = layers.Dense(8, name="down")(layers.Dense(8, "tanh", name="up")(first))
    model = Following(first, hidden + layers.Dense(8, name="teacher")(hidden))
    model.one_by_one = one_by_one
    model.scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if place:
        axes, level = PLACES[place]
        cuts = CUTS if "model" in axes else {}
        spread = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
        mesh = kdist.mesh(**axes)
        config = kdist.ParallelConfig(mesh=mesh, layout_map=cuts, optimizer=spread)
        kdist.parallelize(model, config)
    model.compile(optimizer)
    return model


def train(model: keras.Model, epochs: int = 2) -> list[float]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6)), rng.normal(size=(16, 8))
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False).history["far"]


def same(found: keras.Model, expected: keras.Model) -> None:
    """Whether weights and the optimizer's variables are equal, one by one."""
    every = [[*model.weights, *model.optimizer.variables] for model in (found, expected)]
    for one, other in zip(*every, strict=True):
        np.testing.assert_allclose(
            ops.convert_to_numpy(one), ops.convert_to_numpy(other), rtol=1e-9, atol=1e-12
        )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulates": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "whole tensors": lambda: keras.optimizers.Lamb(0.01),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_has_state_of_those_weights_alone(kind: str, place: str) -> None:
    expected, model = (following(one, OPTIMIZERS[kind]()) for one in ("", place))
    np.testing.assert_allclose(train(model), train(expected), rtol=1e-9)
    same(model, expected)
    model.compile(model.optimizer)  # goes on with the state that is there
    expected.compile(expected.optimizer)
    np.testing.assert_allclose(train(model), train(expected), rtol=1e-9)
    same(model, expected)


def test_a_wrapped_one_has_state_of_those_weights_alone() -> None:
    expected = following("", keras.optimizers.Adam(0.01))
    sharded = kdist.ShardedOptimizer(keras.optimizers.Adam(0.01), level=2, threshold_kb=0)
    model = following("data 4", sharded)
    np.testing.assert_allclose(train(model), train(expected), rtol=1e-9)
    same(model, expected)


@pytest.mark.parametrize("whole", [False, True], ids=["a layer's", "every weight's"])
def test_one_that_was_built_before_may_be_applied_bit_by_bit(whole: bool) -> None:
    models = [following(one, OPTIMIZERS["averages"](), True) for one in ("", "data 4")]
    for model in models:
        built = model.trainable_variables if whole else model.layers[1].trainable_weights
        model.optimizer.build(built)
    np.testing.assert_allclose(train(models[1]), train(models[0]), rtol=1e-9)
    same(models[1], models[0])


def test_one_that_scales_losses_has_state_of_all() -> None:
    """It is built before it scales, and what it will be applied to is not known then."""

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 8.0)

    expected, model = (following(one, scaled()) for one in ("", "data 4"))
    expected.optimizer.build(expected.trainable_variables)
    np.testing.assert_allclose(train(model), train(expected), rtol=1e-9)
    same(model, expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [("data 4", "data 2 x model 2, level 3"), ("data 2 x model 2, level 3", ""), ("", "data 4")],
)
def test_its_checkpoints_go_on(first: str, second: str, tmp_path: Path) -> None:
    adam = OPTIMIZERS["averages"]
    expected = following("", adam())
    train(expected, 4)
    model = following(first, adam())
    train(model)
    kdist.checkpoint.save(model, tmp_path)
    again = following(second, adam())
    kdist.checkpoint.restore(again, tmp_path)
    same(again, model)
    train(again)
    same(again, expected)


@pytest.mark.parametrize("place", PLACES)
def test_its_state_is_counted_and_verified(place: str) -> None:
    model = following(place, keras.optimizers.Adam(0.01))
    train(model)
    slots = 2 * 8 * sum(int(np.prod(v.shape)) for v in model.layers[1].weights)
    found = sum(one.slots for one in kdist.inspect(model).memory)
    counters = 64 * 4  # iterations and rates of each device's own
    assert slots <= found <= slots + counters
    assert sum(one.slots for one in model.plan().memory) == found
    rng = np.random.default_rng(0)
    assert kdist.verify(model, rng.normal(size=(16, 6)), rng.normal(size=(16, 8))).ok


def test_one_that_scaled_losses_says_nothing_of_the_next() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 8.0)
    model = following("data 4", scaled)
    train(model)
    model.scales = False
    model.compile(OPTIMIZERS["averages"]())
    model.optimizer.build(model.trainable_variables)
    train(model)
    assert int(model.optimizer.iterations) == 4


def test_weights_that_were_frozen_since_it_was_built_do_not_count() -> None:
    models = [following(one, keras.optimizers.Adam(0.01), True) for one in ("", "data 4")]
    for model in models:
        adam = keras.optimizers.Adam(0.01)
        adam.build([*model.layers[1].trainable_weights, *model.layers[3].trainable_weights])
        model.layers[3].trainable = False
        model.compile(adam)
    np.testing.assert_allclose(train(models[1]), train(models[0]), rtol=1e-9)
    same(models[1], models[0])
