"""Sums of gradients hold on to what they need, and to no more."""

from __future__ import annotations

import kdist
from kdist.graphs import executed

import keras
import numpy as np
import pytest

LAYERS = 3


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=["data", "inner"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_each_sum_of_parts_has_memory_of_its_own(level: int, axes: dict[str, int]) -> None:
    layers = [keras.layers.Dense(8, use_bias=False, name=f"d{i}") for i in range(LAYERS)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0, partition="slice"),
        layout_map={".*kernel": (None, "model")} if "model" in axes else None,
    )
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    x = np.zeros((8, 8), "float32")
    step = executed.largest(executed.watch(lambda: model.train_on_batch(x, x)))
    assert len(step.select("DeepCopy")) == (4 * LAYERS if level >= 2 else 0)
