"""`kdist.verify` of a model whose frozen weights are stored cut."""

from __future__ import annotations

import kdist

import keras
import numpy as np


def test_what_level_3_stores_of_frozen_layers_is_no_difference() -> None:
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(8, "tanh", name="frozen", trainable=False)
    model = keras.Sequential([keras.Input((8,)), frozen, keras.layers.Dense(2)])
    optimizer = kdist.OptimizerConfig(level=3, threshold_kb=0)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=optimizer)
    kdist.parallelize(model, config).compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.random.default_rng(0).normal(size=(8, 8)), np.ones((8, 2))
    model.fit(x, y, verbose=0)
    assert kdist.verify(model, x, y).ok
