"""Stages that are found by cost, and get next to none of it."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest


class Whole(keras.layers.Layer):
    """All of the work, in a layer that no one can cut."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parts = [keras.layers.Dense(256, "relu", name=f"part{n}") for n in range(4)]

    def build(self, shape: Any) -> None:
        for part in self.parts:
            part.build(shape)

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def staged(middle: list[keras.layers.Layer], stages: Any = "auto") -> keras.Model:
    relu = keras.layers.ReLU(name="first")
    model = keras.Sequential([keras.Input((256,)), relu, *middle], name="staged")
    pipeline = kdist.PipelineConfig(micro_batches=2, stages=stages)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(pipe=2), pipeline=pipeline))
    model.compile("sgd", "mse")
    return model


def test_a_stage_without_work_is_told() -> None:
    model = staged([Whole(name="all")])
    x = np.ones((4, 256))
    said = r"1 of 2 compute less than 5% of the mean, such as the one of \['first'\].*'all' with"
    with pytest.warns(UserWarning, match=said):
        model.fit(x, x, verbose=0)
    assert any("their devices wait" in note for note in model.plan().notes)


@pytest.mark.parametrize("stages", ["auto", {"first": 0, "all": 1}])
def test_stages_with_work_and_those_that_were_asked_for_are_not(stages: Any) -> None:
    parts = [keras.layers.Dense(256, name=f"part{n}") for n in range(2)]
    model = staged(parts if stages == "auto" else [Whole(name="all")], stages)
    x = np.ones((4, 256))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*found by cost")
        model.fit(x, x, verbose=0)
    assert not any("their devices wait" in note for note in model.plan().notes)
