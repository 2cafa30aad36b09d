"""What compression keeps from step to step: through overflows, new optimizers, tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist import CompressionConfig, FusionConfig, OptimizerConfig
from kdist.api.attached import attached

import keras
import numpy as np
import pytest

from .compressed_models import (
    INPUTS,
    OUTPUTS,
    PARTS,
    PIPES,
    ROWS,
    WARM,
    adam,
    assert_equal,
    batches,
    build,
    loop,
    parallel,
    rule_of,
    scaled,
    sgd,
    train,
    weights,
)
from .compressed_reference import Reference
from .harness import precision
from .matrix import MESHES


def kept(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in attached(model).update.jobs.kept]


@pytest.mark.parametrize("step", [train, loop])
def test_a_skipped_step_touches_nothing(step: Callable[..., Any]) -> None:
    """An overflow halves the scale; weights, errors and factors stay, and training goes on."""
    config, rule = rule_of(WARM)
    data = batches()
    with precision("float64"):
        model = parallel({"data": 2}, scaled(), config)
        reference = Reference(model=build(), optimizer=sgd(), replicas=2, rule=rule, twice=True)
        step(model, data[:2])
        before, scale = [*kept(model), *weights(model).values()], model.optimizer.dynamic_scale
        start = float(scale.value)
        for bad in (np.inf, np.nan):
            x, y = data[2]
            x = x.copy()
            x[-1, 3] = bad  # on one replica
            step(model, [(x, y)])
        after = [*kept(model), *weights(model).values()]
        assert float(scale.value) == start / 4
        step(model, data[2:])
        for x, y in data:
            reference.step(x, y)
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)
    assert_equal(model, reference.model)


def test_copies_stay_equal_to_the_bit() -> None:
    """Every slice updates its own copy, and rounds its moments by the same draws."""
    formats = kdist.StateFormatConfig(first="1-6-9", second="0-6-10", rounding="stochastic")
    config = CompressionConfig(patterns={".*up/kernel": WARM, ".*down/kernel": "bf16"})
    with precision("float32"):
        model = parallel(
            {"data": 2}, adam(), config, optimizer=OptimizerConfig(state_format=formats)
        )
        train(model, batches())
    parallel_ = attached(model)
    for entry in parallel_.entries.values():
        first, *others = [v.numpy() for v in entry.locals.values()]
        assert len(others) == 1
        for other in others:
            np.testing.assert_array_equal(first, other)
    memory = kdist.inspect(model).memory
    kernels = (INPUTS * 16 + 16 * OUTPUTS) * 2 * 2  # two moments of two bytes, on each
    assert all(m.slots >= kernels for m in memory)
    # Loading reaches every copy.
    slot = model.optimizer._momentums[0]
    slot.assign(np.ones(slot.shape))
    for one in parallel_.update.jobs.local[0]:
        for variable in one.optimizer._momentums:
            if variable.shape == slot.shape:
                np.testing.assert_array_equal(variable.numpy(), 1.0)


@pytest.mark.parametrize(
    "mesh", ["data2", pytest.param("pipe2_data2_model2", marks=pytest.mark.long)]
)
def test_state_is_kept_by_compile_and_by_tuning(mesh: str) -> None:
    """What was not sent is sent later, whatever optimizer, level or bucket comes in between."""
    config, rule = rule_of(WARM)
    axes, data = {**MESHES, **PIPES}[mesh], batches(steps=8)
    with precision("float64"):
        model = parallel(axes, sgd(), config)
        reference = Reference(
            model=build(),
            optimizer=sgd(),
            replicas=2,
            rule=rule,
            twice=True,
            parts=PARTS if "model" in axes else {},
        )
        train(model, data[:2])
        spread_out = kdist.ShardedOptimizer(keras.optimizers.SGD(0.1), level=1, threshold_kb=0)
        model.compile(spread_out, "mse")
        candidates = (FusionConfig(mode="none"), FusionConfig(mode="size", size_mb=1))
        tuning = kdist.callbacks.CommFusion(tune=True, candidates=candidates, steps=1)
        x, y = (np.concatenate(parts) for parts in zip(*data[2:]))
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[tuning])
        assert len(tuning.tried) == 2
        for n, (x, y) in enumerate(data):
            if n == 2:
                reference.optimizer = keras.optimizers.SGD(0.1)
            reference.step(x, y)
    assert_equal(model, reference.model)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long)]
)
def test_mixed_precision_learns(policy: str) -> None:
    config = CompressionConfig(patterns={".*up/kernel": WARM, ".*down/kernel": "fp16"})
    data = batches(rows=16, steps=1) * 15
    with precision(policy):
        losses = train(parallel({"data": 2}, adam(), config), data)
    assert np.isfinite(losses).all() and losses[-1] < 0.98 * losses[0]


@pytest.mark.long
def test_one_replica_sends_nothing() -> None:
    config, _ = rule_of(WARM)
    with precision("float64"):
        models = [parallel({"data": 1}, sgd(), one) for one in (None, config)]
        losses = [train(model, batches(steps=2)) for model in models]
    assert losses[0] == losses[1]
    assert "mesh data=1 has one" in models[1].plan().notes[0]
    assert models[1].plan().exchanges == ()
