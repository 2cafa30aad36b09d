"""Optimizer moments in 16 bits: equal to one device that rounds its moments in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist import StateFormatConfig
from kdist._compat import keras_optimizers, keras_trainer
from kdist.config.state_format import SLOTS
from kdist.storage.state_formats import FORMATS

import keras
import numpy as np
import pytest

from .features import BY_NAME as FEATURES
from .harness import Run, build, compiled, precision, train
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check
from .zoo import BY_NAME

BOTH = StateFormatConfig(first="1-6-9", second="0-6-10")
NAMES = ("adam", "adamw", "sgd_momentum", "rmsprop", "lion", "lamb", "muon", "loss_scale_sgd")
COMPOSED = ("gradient_accumulation", "global_clipnorm", "ema", "loss_scale_factor", "run_eagerly")
ROWS = product(NAMES, (0, 1, 2, 3), ("none",), ("data4", "data2_model2"))
ROWS += product(("adamw",), (0, 1, 2, 3), COMPOSED, ("data4", "data2_model2"))
DEFAULT = [
    ("adam", 0, "none", "data2_model2"),
]


def rounding(factory: Callable[..., Any], formats: StateFormatConfig) -> Callable[..., Any]:
    """A factory of optimizers that round a moment after each write to it, in plain tensors."""

    def make(**options: Any) -> Any:
        outer = factory(**options)
        optimizer = getattr(outer, "inner_optimizer", outer)

        def write(method: str, variable: Any, value: Any) -> bool:
            for name, slot in SLOTS[type(optimizer).__name__].items():
                form = formats.format_of(slot.moment)
                if form is not None and any(v is variable for v in getattr(optimizer, name, [])):
                    tensor = keras_trainer.tf_variable(variable)
                    getattr(tensor, method)(value)
                    tensor.assign(form.decode(form.encode(tensor), tensor.dtype))
                    return True
            return False

        keras_optimizers.route_assignments(optimizer, write)
        return outer

    return make


def plain_rmsprop(**options: Any) -> Any:
    return keras.optimizers.RMSprop(**{"learning_rate": 0.01, "momentum": 0.5, **options})


@pytest.mark.parametrize(("name", "level", "feature", "mesh"), spread(ROWS, DEFAULT))
def test_equals_one_device_that_rounds(name: str, level: int, feature: str, mesh: str) -> None:
    factory = plain_rmsprop if name == "rmsprop" else OPTIMIZERS[name]
    config = kdist.OptimizerConfig(level=level, threshold_kb=0, state_format=BOTH)
    run = Run(
        case=BY_NAME["mlp"],
        mesh_axes=MESHES[mesh],
        optimizer=factory,
        features=[FEATURES[feature]],
        config={"optimizer": config},
    )
    actual = train(run, "kdist")
    rounded = train(dataclasses.replace(run, optimizer=rounding(factory, BOTH)), "plain")
    check(rounded, actual, TOLERANCES["float64"], (), title=run.title)


def trained(formats: StateFormatConfig, dtype: str = "float32", **config: Any) -> keras.Model:
    run = Run(
        case=BY_NAME["mlp"],
        mesh_axes={"data": 4},
        optimizer=OPTIMIZERS["adam"],
        dtype=dtype,
        config={"optimizer": kdist.OptimizerConfig(threshold_kb=0, state_format=formats, **config)},
    )
    with precision(dtype):
        model = compiled(run, "kdist")
        x, y, _ = run.case.data(0, 16)
        model.fit(x, y, batch_size=8, verbose=0)
    return model


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.long)])
def test_inspect_counts_half_the_bytes(level: int) -> None:
    """Two moments of 4 bytes become two of 2, on every device; what is left are counters."""
    whole = kdist.inspect(trained(StateFormatConfig(), level=level)).memory
    half = kdist.inspect(trained(BOTH, level=level)).memory
    for a, b in zip(whole, half):
        counter = 12 if a.slots else 0  # int64 iterations, float32 learning rate
        assert 2 * (b.slots - counter) == a.slots - counter
        assert (a.device, a.parameters) == (b.device, b.parameters)
    assert sum(m.slots for m in half) > 1000


def test_saved_state_is_whole_and_goes_on(tmp_path: Path) -> None:
    """What the user's optimizer shows are decoded floats; training goes on from a file."""
    model = trained(BOTH, "float64", level=1)
    moments = model.optimizer._velocities[0].numpy()
    form = FORMATS["0-6-10"]
    np.testing.assert_array_equal(moments, form.decode(form.encode(moments), "float64"))
    assert moments.dtype == np.float64 and moments.shape == model.trainable_variables[0].shape
    model.save(tmp_path / "model.keras")
    with precision("float64"):
        again = keras.models.load_model(tmp_path / "model.keras")
        for a, b in zip(again.optimizer.variables, model.optimizer.variables):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        config = kdist.OptimizerConfig(level=3, threshold_kb=0, state_format=BOTH)
        kdist.parallelize(again, kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=config))
        x, y, _ = BY_NAME["mlp"].data(5, 16)
        for one in (model, again):
            one.fit(x, y, batch_size=8, verbose=0)
    for a, b in zip(again.optimizer.variables, model.optimizer.variables):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-9)


def test_what_does_not_apply_is_refused_before_anything_changes() -> None:
    with precision("float32"):
        model = build(BY_NAME["mlp"])
        config = kdist.OptimizerConfig(state_format=BOTH)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=config))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y, _ = BY_NAME["mlp"].data(5, 8)
        with pytest.raises(ValueError, match="no moment.*Received: first='1-6-9'"):
            model.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match="Received: state_format='bf16'"):
        kdist.OptimizerConfig(state_format="bf16")  # type: ignore[arg-type]


def test_sharded_optimizer_says_the_same(tmp_path: Path) -> None:
    optimizer = kdist.ShardedOptimizer("adam", level=1, state_format=BOTH)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.kdist_config == optimizer.kdist_config
    assert again.kdist_config.state_format == BOTH
    assert "1-6-9 and 0-6-10" in str(again.kdist_config)
    variable = keras.Variable([1.0])
    with pytest.raises(ValueError, match=r"kdist.parallelize.*Received: state_format="):
        optimizer.apply([np.ones(1)], [variable])
