"""A line says which layers an overridden `compute_loss` calls: they compute on one device."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

WORDS = "layers that compute_loss calls compute on one device"


class Distilled(keras.Model):
    """A student, whose loss calls a teacher that it has."""

    teacher: keras.Model | None = None

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **options: Any
    ) -> Any:
        assert self.teacher is not None
        return ops.mean((y - y_pred) ** 2) + ops.mean((self.teacher(x) - y_pred) ** 2)


class Sloped(keras.Model):
    """Calls itself once more."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **options: Any
    ) -> Any:
        return ops.mean((y - y_pred) ** 2) + ops.mean(self(x + 0.1) ** 2)


class Weighed(keras.Model):
    """Calls a layer without weights, and reads a weight of one that it does not call."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **options: Any
    ) -> Any:
        penalty = ops.mean(self.get_layer("up").kernel ** 2)
        return ops.mean(layers.Flatten()((y - y_pred) ** 2)) + penalty


def network(kind: type) -> keras.Model:
    first = keras.Input((4,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    return kind(first, layers.Dense(2, name="down")(hidden), name=kind.__name__.lower())


def told(kind: type, axes: dict[str, int]) -> list[str]:
    model = network(kind)
    if kind is Distilled:
        model.teacher = network(keras.Model)
    stages = kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None
    cuts = {"up/kernel": (None, "model")} if "model" in axes else {}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, pipeline=stages)
    kdist.parallelize(model, config)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile("sgd")
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
    return [str(one.message) for one in caught if WORDS in str(one.message)]


@pytest.mark.parametrize("axes", [{"data": 2}, {"model": 2}, {"pipe": 2}], ids=str)
@pytest.mark.parametrize(("kind", "name"), [(Distilled, "model"), (Sloped, "sloped")])
def test_layers_that_a_loss_calls_are_told_once(
    kind: type, name: str, axes: dict[str, int]
) -> None:
    (text,) = told(kind, axes)
    assert f"Received: ['{name}']" in text and "train_step" in text


@pytest.mark.parametrize(
    ("kind", "axes"), [(Weighed, {"data": 2}), (Distilled, {"data": 1})], ids=str
)
def test_what_loses_nothing_is_not_told(kind: type, axes: dict[str, int]) -> None:
    assert told(kind, axes) == []
