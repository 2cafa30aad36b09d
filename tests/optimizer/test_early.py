"""Which optimizers need all sums of a step before any update, and what a step's work says of it."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.optimizer.early import needs_all
from kdist.pipeline import Reduce, Update

import keras
import numpy as np
import pytest

KEEN: dict[str, Any] = {
    "adam": lambda: keras.optimizers.Adam(),
    "clips each": lambda: keras.optimizers.Adam(clipnorm=1.0),
    "sharded": lambda: kdist.ShardedOptimizer(keras.optimizers.SGD(), level=2),
}
PATIENT: dict[str, Any] = {
    "clips all": lambda: keras.optimizers.Adam(global_clipnorm=1.0),
    "accumulates": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "scales": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "sharded": lambda: kdist.ShardedOptimizer(
        keras.optimizers.SGD(global_clipnorm=1.0), level=2, threshold_kb=0
    ),
}


def stack() -> keras.Model:
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(6)]
    return keras.Sequential([keras.Input((64,)), *layers])


@pytest.mark.parametrize(
    ("make", "waits"), [(m, False) for m in KEEN.values()] + [(m, True) for m in PATIENT.values()]
)
def test_what_needs_all_sums(make: Any, waits: bool) -> None:
    assert needs_all(make(), stack().trainable_variables) is waits


@pytest.mark.parametrize("name", ["clips each", "clips all", "accumulates", "scales"])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
def test_the_work_of_a_step_says_when_updates_are(name: str, axes: dict[str, int]) -> None:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map={".*kernel": (None, "model")} if "model" in axes else {},
        optimizer=kdist.OptimizerConfig(level=2, threshold_kb=0),
        fusion=kdist.FusionConfig(mode="none"),
    )
    model = kdist.parallelize(stack(), config)
    model.compile((KEEN | PATIENT)[name](), "mse")
    x = np.ones((8, 64), np.float32)
    for traced in (False, True):
        work = model.plan().work
        updates, sums = work.of(Update), work.of(Reduce)
        assert {w for one in updates for w in one.weights} == set(range(6)), traced
        assert (len(updates) > 1) is (name in KEEN) and len(sums) > 2
        if not traced:
            model.train_on_batch(x, x)
