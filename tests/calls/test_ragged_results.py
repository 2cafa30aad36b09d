"""Layers that give ragged tensors, called by a step of the user's own."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close
from ..ragged_words import RAGGED_IDS, TEXTS, RaggedWords

pytestmark = pytest.mark.usefixtures("float64")
Y = np.random.default_rng(1).normal(size=(4, 2))


class Words(RaggedWords):
    """Its step calls it itself."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((Words.call(self, x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"mean": loss}


def fitted(texts: bool, cut: bool) -> list[Any]:
    keras.utils.set_random_seed(0)
    model, x = Words(texts), tf.constant(TEXTS if texts else RAGGED_IDS)
    model(x)
    if cut:
        layout_map: Any = {".*table/embeddings": ("model", None), ".*head/kernel": ("model", None)}
        mesh = kdist.mesh(data=2, model=2)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layout_map))
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(x, Y, batch_size=3, epochs=2, shuffle=False, verbose=0).history
    return [*history.values(), *model.get_weights()]


@pytest.mark.parametrize("texts", [False, True])
def test_a_step_goes_on_with_them(texts: bool) -> None:
    expected, values = (fitted(texts, cut) for cut in (False, True))
    for one, other in zip(expected, values, strict=True):
        assert_close(one, other)
