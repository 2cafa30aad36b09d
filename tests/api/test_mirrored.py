"""`kdist.ShardedOptimizer` under Keras's own `fit` in a `tf.distribute.MirroredStrategy` scope."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kdist
from kdist._compat import keras_optimizers, keras_trainer, mirrored_internals

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, assert_same_history, in_float64

optimizers = keras.optimizers
ROWS, WORDS, LENGTH = 24, 11, 5
DEVICES = ("cpu:0", "cpu:1")
HIDDEN = 12


@functools.cache
def strategy(devices: tuple[str, ...] = DEVICES) -> tf.distribute.MirroredStrategy:
    """One object per process: two over the same devices would mix up their collectives."""
    return tf.distribute.MirroredStrategy(list(devices))


def build(table: bool = True) -> keras.Model:
    """Words to three values: rows of a table, kernels, biases, and a frozen layer."""
    keras.utils.set_random_seed(3)
    words = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 8, trainable=table)(words)
    x = keras.layers.Dense(6, trainable=False)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dense(HIDDEN, "tanh")(x)
    return keras.Model(words, keras.layers.Dense(3)(x))


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, WORDS, (ROWS, LENGTH)), random.normal(size=(ROWS, 3))


def train(
    make: Callable[[], Any],
    scope: Any = None,
    epochs: int = 2,
    table: bool = True,
    **options: Any,
) -> tuple[keras.Model, Any]:
    """Trains a new model, in the scope of a strategy if there is one."""
    keras.utils.clear_session(free_memory=False)  # names count from the start again
    with scope.scope() if scope is not None else contextlib.nullcontext():
        model = build(table)
        model.compile(make(), "mse", metrics=["mae"], **options)
    if scope is None:
        # Built while tracing, ScheduleFreeAdamW would start anew with every step.
        with keras_optimizers.build_scope(model.optimizer):
            model.optimizer.build(model.trainable_variables)
    return model, fit(model, epochs)


def fit(model: keras.Model, epochs: int = 1) -> Any:
    return model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def sharded(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: kdist.ShardedOptimizer(make(), **options)


def assert_same(one: keras.Model, other: keras.Model) -> None:
    assert_close(one.get_weights(), other.get_weights())
    assert [v.path for v in one.optimizer.variables] == [v.path for v in other.optimizer.variables]
    values = [[v.numpy() for v in m.optimizer.variables] for m in (one, other)]
    assert_close(*values)
    for variable in other.trainable_variables:
        copies = mirrored_internals.copies(keras_trainer.tf_variable(variable))
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())


def excluding() -> Any:
    made = optimizers.AdamW(0.01, weight_decay=0.1)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


SCHEDULE = optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
DEFAULT: dict[str, Callable[[], Any]] = {
    "adam_global_clipnorm_schedule": lambda: optimizers.Adam(SCHEDULE, global_clipnorm=0.1),
    "lamb": lambda: optimizers.Lamb(0.05),
}
LONG: dict[str, Callable[[], Any]] = {
    "muon": lambda: optimizers.Muon(0.05),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipnorm": lambda: optimizers.Adam(0.05, clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "weight_decay": excluding,
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, loss_scale_factor=128.0),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
    "nadam": lambda: optimizers.Nadam(0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.05, centered=True, momentum=0.5),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "adadelta": lambda: optimizers.Adadelta(0.5),
    "adamax": lambda: optimizers.Adamax(0.05),
    "ftrl": lambda: optimizers.Ftrl(0.05),
    "lion": lambda: optimizers.Lion(0.01),
    "schedule_free": lambda: optimizers.ScheduleFreeAdamW(0.05),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_it_equals_one_device(name: str) -> None:
    make = {**DEFAULT, **LONG}[name]
    table = name != "loss_scale_factor"  # Keras does not divide rows
    plain, expected = train(make, table=table)
    model, history = train(sharded(make), strategy(), table=table)
    assert_same_history(expected, history)
    assert_same(plain, model)
    assert model.optimizer._mirrored is not None


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["adam_global_clipnorm_schedule", "muon", "accumulation"])
def test_on_four_devices(name: str) -> None:
    make = {**DEFAULT, **LONG}[name]
    plain, expected = train(make)
    model, history = train(sharded(make), strategy(tuple(f"cpu:{n}" for n in range(4))))
    assert_same_history(expected, history)
    assert_same(plain, model)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_keras_alone_clips_what_each_replica_has() -> None:
    """Why clipping differs from Keras under the strategy: it clips before it sums."""
    make = DEFAULT["adam_global_clipnorm_schedule"]
    plain, _ = train(make)
    mirrored, _ = train(make, strategy())
    difference = max(
        np.abs(a - b).max() for a, b in zip(plain.get_weights(), mirrored.get_weights())
    )
    assert difference > 1e-4
    make = LONG["nadam"]
    mirrored, expected = train(make, strategy())
    model, history = train(sharded(make), strategy())
    assert_same_history(expected, history)
    assert_close(mirrored.get_weights(), model.get_weights())


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_accumulated_as_sums_of_each_replica_or_on_the_owner() -> None:
    make = LONG["accumulation"]
    plain, _ = train(make)
    found = {}
    for shard in (False, True):
        model, _ = train(sharded(make, gradient_accumulation_shard=shard), strategy())
        assert_same(plain, model)
        found[shard] = sum(model.optimizer.state_bytes().values())
    # The second replica's sums of what is dense; the table's rows are summed on the owner.
    dense = sum(v.numpy().nbytes for v in model.trainable_variables[1:])
    assert found[False] - found[True] >= dense


# -- memory --------------------------------------------------------------------------------------


def variables_of_shape(shape: tuple[int, ...]) -> dict[str, int]:
    """How many `tf.Variable`s of a shape exist in this process, by device."""
    gc.collect()
    found: dict[str, int] = {}
    for one in gc.get_objects():
        if type(one).__name__ == "ResourceVariable" and tuple(one.shape) == shape:
            device = tf.DeviceSpec.from_string(one.device)
            found[f"cpu:{device.device_index}"] = found.get(f"cpu:{device.device_index}", 0) + 1
    return found


@pytest.fixture(scope="module")
def adam() -> Iterator[keras.Model]:
    with in_float64():
        model, _ = train(sharded(lambda: optimizers.Adam(SCHEDULE)), strategy(), epochs=1)
        yield model


def test_state_is_on_the_owner_alone(adam: keras.Model) -> None:
    kernels = [v for v in adam.trainable_variables if tuple(v.shape) == (6, HIDDEN)]
    assert len(kernels) == 1
    # A copy of the parameter each; both moments on one.
    assert sorted(variables_of_shape((6, HIDDEN)).values()) == [1, 3]
    assert all(keras_trainer.is_view(v) for v in adam.optimizer.variables)


def test_state_is_kept_once_and_balanced(adam: keras.Model) -> None:
    found = adam.optimizer.state_bytes()
    assert list(found) == ["/device:CPU:0", "/device:CPU:1"]
    parameters = [v.numpy().nbytes for v in adam.trainable_variables]
    scalars = 8 + 8  # each device's step counter and learning rate
    assert sum(found.values()) == 2 * sum(parameters) + 2 * scalars
    assert max(found.values()) - min(found.values()) <= 2 * max(parameters)


def test_keras_alone_keeps_it_everywhere() -> None:
    """The check can fail: the same, without kdist."""
    shape = (6, HIDDEN + 1)

    def wide() -> keras.Model:
        inputs = keras.Input((6,))
        return keras.Model(inputs, keras.layers.Dense(HIDDEN + 1)(inputs))

    with strategy().scope():
        model = wide()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    assert variables_of_shape(shape) == {"cpu:0": 3, "cpu:1": 3}


# -- Keras's contract ----------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_saved_and_loaded(adam: keras.Model, tmp_path: Path) -> None:
    adam.save(tmp_path / "model.keras")
    with strategy().scope():
        again = keras.saving.load_model(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    for one in (again, plain):
        assert isinstance(one.optimizer, kdist.ShardedOptimizer)
        values = [[v.numpy() for v in m.optimizer.variables] for m in (adam, one)]
        assert_close(*values)
    assert again.optimizer._mirrored is not None and plain.optimizer._mirrored is None
    fit(again)
    fit(plain)
    assert_same(plain, again)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_step_by_step() -> None:
    make = DEFAULT["adam_global_clipnorm_schedule"]
    plain, expected = train(make)
    model, history = train(sharded(make), strategy(), run_eagerly=True)
    assert_same_history(expected, history)
    assert_same(plain, model)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_loss_scaling_around_it() -> None:
    def make() -> Any:
        return optimizers.LossScaleOptimizer(kdist.ShardedOptimizer(optimizers.SGD(0.1)))

    plain, expected = train(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)))
    model, history = train(make, strategy())
    assert_same_history(expected, history)
    assert_close(plain.get_weights(), model.get_weights())


@pytest.mark.long
def test_an_overflow_on_the_last_replica_skips_the_step() -> None:
    model, _ = train(sharded(LONG["loss_scale"]), strategy(), epochs=1)
    before = [w.copy() for w in model.get_weights()]
    scale = float(model.optimizer.inner_optimizer.dynamic_scale)
    x, y = data()
    y[-1] = np.inf
    model.fit(x, y, batch_size=ROWS, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(model.optimizer.inner_optimizer.dynamic_scale) == scale / 2


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_callbacks_change_the_learning_rate_of_all() -> None:
    def run(make: Any, scope: Any) -> keras.Model:
        keras.utils.clear_session(free_memory=False)
        with scope.scope() if scope else contextlib.nullcontext():
            model = build()
            model.compile(make(), "mse")
        change = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        model.fit(*data(), batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[change])
        return model

    def make() -> Any:
        return optimizers.SGD(0.5, momentum=0.9)

    assert_same(run(make, None), run(sharded(make), strategy()))


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_parallelized_afterwards() -> None:
    """Training goes on under kdist, with the state that the strategy's replicas had."""
    make = lambda: optimizers.Adam(0.05)  # noqa: E731
    plain, _ = train(make)
    model, _ = train(sharded(make), strategy())
    model = kdist.parallelize(model)
    fit(plain)
    fit(model)
    assert_close(plain.get_weights(), model.get_weights())


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 2}, "only optimizer state can be spread.*Received: level=2"),
        ({"level": 3}, "kdist.parallelize.*Received: level=3"),
        ({"partition": "slice"}, "whole parameters are dealt.*Received: partition='slice'"),
    ],
)
def test_settings_without_meaning(options: dict[str, Any], message: str) -> None:
    with strategy().scope():
        model = build()
        optimizer = kdist.ShardedOptimizer("adam", **options)
    with pytest.raises(ValueError, match=message):
        optimizer.build(model.trainable_variables)


def test_level_0_and_one_replica_are_keras_alone() -> None:
    for scope, level in ((strategy(), 0), (strategy(("cpu:0",)), 1)):
        with scope.scope():
            model = build()
            optimizer = kdist.ShardedOptimizer("adam", level=level)
            optimizer.build(model.trainable_variables)
        assert optimizer._mirrored is None
        with pytest.raises(ValueError, match="state_bytes is for.*Received: "):
            optimizer.state_bytes()


def test_a_call_outside_of_the_replicas(adam: keras.Model) -> None:
    gradients = [tf.zeros(v.shape, v.dtype) for v in adam.trainable_variables]
    with pytest.raises(ValueError, match="applied by every replica.*Received: a call with"):
        adam.optimizer.apply(gradients)
    with pytest.raises(ValueError, match="applied by every replica"):
        adam.optimizer.apply(gradients, adam.trainable_variables)


def test_other_variables(adam: keras.Model) -> None:
    other = keras.Variable(np.zeros((2,), np.float32))
    with pytest.raises(ValueError, match="built with.*Received: variables="):
        adam.optimizer._mirrored._places([other])
    with strategy().scope():
        mixed = [*build().trainable_variables[:1], other]
        with pytest.raises(ValueError, match="made in the strategy's scope.*one copy"):
            kdist.ShardedOptimizer("sgd").build(mixed)
