"""`kdist.ShardedOptimizer` is a Keras optimizer: config, saving, schedules, callbacks, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist
from kdist.optimizer.wrappers import unwrap

import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(16, 8))
Y = np.random.default_rng(1).normal(size=(16, 4))


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )


def sharded(**options: Any) -> kdist.ShardedOptimizer:
    inner = keras.optimizers.Adam(0.01)
    return kdist.ShardedOptimizer(inner, **{"level": 2, "threshold_kb": 0, **options})


def parallel(optimizer: Any, level: int = 0) -> keras.Model:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2), optimizer=kdist.OptimizerConfig(level=level)
    )
    model = kdist.parallelize(build(), config)
    model.compile(optimizer, "mse")
    return model


def test_config_round_trip() -> None:
    made = sharded(level=3, keep_gathered=True, partition="slice", state_on="host")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert isinstance(again, kdist.ShardedOptimizer)
    assert again.kdist_config == made.kdist_config
    assert again.inner_optimizer.get_config() == made.inner_optimizer.get_config()


def test_saved_and_loaded_with_its_state(tmp_path: Path) -> None:
    model = parallel(sharded(level=3))
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kdist.ShardedOptimizer)
    kdist.parallelize(loaded, kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    for one in (model, loaded):
        one.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_schedule_and_callbacks_reach_the_inner_optimizer() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = parallel(kdist.ShardedOptimizer(keras.optimizers.SGD(schedule), level=1))
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 2
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)
    model = parallel(sharded())
    change = keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[change])
    assert float(unwrap(model.optimizer).inner.learning_rate) == 0.25


def test_on_one_plain_device_it_is_the_inner_optimizer() -> None:
    plain, wrapped = build(), build()
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    wrapped.compile(sharded(), "mse")
    for model in (plain, wrapped):
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(plain.get_weights(), wrapped.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_on_one_plain_device_its_own_way_of_applying_counts() -> None:
    class Still(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            return super().apply_gradients([(0.0 * g, v) for g, v in grads_and_vars])

    model = build()
    before = model.get_weights()
    model.compile(kdist.ShardedOptimizer(Still(0.1), level=0), "mse")
    model.train_on_batch(X, Y)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_state_on_the_host() -> None:
    model = parallel(sharded(level=1, state_on="host"))
    assert model.plan().uses_host
    model.fit(X, Y, batch_size=8, verbose=0)
    plain = build()
    plain.compile(sharded(state_on="host"), "mse")
    with pytest.raises(ValueError, match="Pass the model through it.*Received: state_on='host'"):
        plain.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_loss_scaling_around_and_inside(order: str) -> None:
    scale = keras.optimizers.LossScaleOptimizer
    if order == "inside":
        optimizer = kdist.ShardedOptimizer(scale(keras.optimizers.SGD(0.1)), level=1)
    else:
        optimizer = scale(kdist.ShardedOptimizer(keras.optimizers.SGD(0.1), level=1))
    found = unwrap(optimizer)
    assert isinstance(found.inner, keras.optimizers.SGD)
    assert found.loss_scale is not None and found.config is not None
    model, plain = parallel(optimizer), build()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    for one in (model, plain):
        one.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def mixed(optimizer: Any, wrapped: bool, **options: Any) -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    model = build()
    if wrapped:
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile(optimizer, "mse", **options)
    return model


def scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)


@pytest.mark.parametrize("wrapped", [True, False])
def test_losses_are_scaled_once(wrapped: bool) -> None:
    """Keras does not look into wrappers: under mixed_float16 it would scale once more."""
    inside = kdist.ShardedOptimizer(scaled(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="auto_scale_loss=False"):
        mixed(inside, wrapped)
    plain = mixed(scaled(keras.optimizers.SGD(0.1)), False)
    model = mixed(inside, wrapped, auto_scale_loss=False)
    for one in (plain, model):
        one.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
    found = unwrap(model.optimizer).loss_scale
    assert float(found.dynamic_scale.numpy()) == float(plain.optimizer.dynamic_scale.numpy())


def test_an_opted_out_parameter_stays_whole_at_level_3() -> None:
    model = build()
    kdist.set_parallel_optimizer(model.layers[0], False)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2), optimizer=kdist.OptimizerConfig(level=3, threshold_kb=0)
    )
    model = kdist.parallelize(model, config)
    model.compile("adam", "mse")
    hows = {d.path: d.how for d in model.plan().decisions}
    assert [hows[v.path] for v in model.trainable_variables] == ["whole"] * 2 + ["slice"] * 2
    kdist.set_parallel_optimizer(model.trainable_variables[0], True)
    model.compile("adam", "mse")
    assert model.plan().decisions[0].how == "slice"


def test_compiling_again_at_another_level_moves_the_weights() -> None:
    model = parallel(sharded(level=3))
    before = model.get_weights()
    assert any(w.data_dim is not None for w in model.plan().weights)
    model.compile("sgd", "mse")
    assert all(w.data_dim is None for w in model.plan().weights)
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="not another ShardedOptimizer"):
        kdist.ShardedOptimizer(sharded())
    with pytest.raises(ValueError, match="takes a Keras optimizer.*inner_optimizer=None"):
        kdist.ShardedOptimizer(None)
    with pytest.raises(ValueError, match="Received: level=7"):
        kdist.ShardedOptimizer("adam", level=7)
    with pytest.raises(ValueError, match="Received: value=1"):
        kdist.set_parallel_optimizer(keras.layers.Dense(2), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a keras layer"):
        kdist.set_parallel_optimizer("dense", True)
    with pytest.raises(ValueError, match="ask for different"):
        parallel(sharded(level=1), level=2)
