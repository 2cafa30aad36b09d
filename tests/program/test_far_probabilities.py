"""Probabilities that Keras's cross-entropies would clip: Keras starts from the logits then.

It finds them on the tensor that the activation made. A loss or a metric that sees a tensor put
together from others took the probabilities, clipped, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

pytestmark = pytest.mark.usefixtures("float64")

X = 40 * np.random.default_rng(0).normal(size=(8, 6))
Y = np.random.default_rng(1).integers(0, 4, 8)


def build(activation: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    outputs = layers.Dense(4, name="up", activation=activation)(inputs)
    return keras.Model(inputs, outputs)


def trained(config: Any, activation: Any, **compiled: Any) -> dict[str, np.ndarray]:
    model = build(activation)
    if config is not None:
        model = kdist.parallelize(model, config)
    model.compile(keras.optimizers.SGD(1e-3), **compiled)
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    found = {name: np.array(values) for name, values in history.items()}
    found["evaluated"] = np.array(model.evaluate(X, Y, batch_size=4, verbose=0))
    return found | {v.path: v.numpy() for v in model.weights}


def config(axes: Mapping[str, int]) -> kdist.ParallelConfig:
    layout = {"up/kernel": (None, "model"), "up/bias": ("model",)} if "model" in axes else {}
    pipeline = kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None
    return kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout, pipeline=pipeline)


def alike(axes: Mapping[str, int], activation: Any, **compiled: Any) -> None:
    expected = trained(None, activation, **compiled)
    assert expected["loss"][0] > 20  # what a clipped probability gives is 16.2 at most
    actual = trained(config(axes), activation, **compiled)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


MESHES = [{"data": 4}, {"data": 2, "model": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("activation", ["softmax", ops.softmax])
def test_loss(axes: Mapping[str, int], activation: Any) -> None:
    alike(axes, activation, loss="sparse_categorical_crossentropy")
