"""Stages that have nothing to train: their layers only change a shape."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

from .case import CLASSES, Case, labels
from .harness import compare
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS


def _build() -> keras.Model:
    x = inputs = keras.Input((6, 12), name="image")
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dense(8, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="flat_first")


def _data(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 6, 12)), labels(rng, samples), None


FLAT = Case(name="flat_first", build=_build, data=_data, layout_map={})
MESHES = {
    "pipe2": {"pipe": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


def alone(model: keras.Model) -> None:
    """The first stage has no weights."""
    for layer in model.layers[1:]:
        kdist.set_stage(layer, int(layer.name != "flat"))


@pytest.mark.parametrize(
    ("schedule", "mesh"),
    spread(product(("1f1b", "zero_bubble"), MESHES), [("1f1b", "pipe2_model2")]),
)
def test_a_stage_without_weights(schedule: Any, mesh: str) -> None:
    compare(
        FLAT,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": kdist.PipelineConfig(micro_batches=2, schedule=schedule)},
        declare=alone,
    )
