"""Convolutions with filters in groups, of which XLA compiles each, equal one device.

On a CPU TensorFlow has no kernels of its own for them.
"""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

from .case import CLASSES, Case, Data, labels, weights
from .harness import compare
from .matrix import level_config, spread
from .optimizer_zoo import OPTIMIZERS

SIDE = 6


def _build() -> keras.Model:
    x = inputs = keras.Input((SIDE, SIDE, 4), name="image")
    x = layers.Conv2D(8, 3, groups=2, padding="same", activation="tanh", name="pairs")(x)
    x = layers.Conv2D(8, 3, groups=8, strides=2, name="each")(x)
    x = layers.GlobalAveragePooling2D(name="means")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="grouped")


def _data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, SIDE, SIDE, 4))
    return x, labels(rng, samples), weights(rng, samples)


CASE = Case(name="grouped", build=_build, data=_data, layout_map={"head/kernel": ("model", None)})
STAGES = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
AGAIN = {"recompute": kdist.RecomputeConfig(layers=["pairs", "each"])}
ROWS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data2": ({"data": 2}, {}),
    "data2, whole": ({"data": 2}, level_config("no_overlap")),
    "data2, level 3": ({"data": 2}, level_config("level3")),
    "data2, again": ({"data": 2}, {**AGAIN, **level_config("level2")}),
    "data2 model2": ({"data": 2, "model": 2}, level_config("level3")),
    "pipe2 data2": ({"pipe": 2, "data": 2}, {**STAGES, **level_config("level1")}),
    "pipe2 model2": ({"pipe": 2, "model": 2}, STAGES),
}


DEFAULT = [("data2",), ("pipe2 model2",)]


@pytest.mark.parametrize("row", spread([(row,) for row in ROWS], DEFAULT, quick=0))
def test_filters_in_groups_equal_one_device(row: str, engine: str) -> None:
    axes, options = ROWS[row]
    compare(CASE, axes, optimizer=OPTIMIZERS["sgd_momentum"], engine=engine, config=options)
