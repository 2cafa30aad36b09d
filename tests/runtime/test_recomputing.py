"""What is said where nothing can be computed again."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest

layers = keras.layers
NOTE = "recompute (full): 2 blocks, from block0_down, block1_down"


class Own(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2)


def messages(kind: type[keras.Model]) -> list[str]:
    words = keras.Input((5,), dtype="int32")
    h: Any = layers.Embedding(9, 8)(words)
    for k in range(2):
        h = layers.Dense(8, "gelu", name=f"block{k}_down")(layers.Dense(16, "gelu")(h))
    model = kind(words, layers.Dense(1)(layers.GlobalAveragePooling1D()(h)))
    again = kdist.RecomputeConfig(layers=[r"block(\d)_.*"])
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), recompute=again)
    kdist.parallelize(model, config).compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(np.zeros((4, 5)), np.zeros((4, 1)), verbose=0)
    assert NOTE in model.plan().notes
    return [str(one.message) for one in found if "computes nothing again" in str(one.message)]


@pytest.mark.parametrize(("kind", "count"), [(keras.Model, 0), (Own, 1)])
def test_a_pass_without_anything_to_repeat_is_told(kind: type[keras.Model], count: int) -> None:
    found = messages(kind)
    assert len(found) == count
    assert all(f"Received: {NOTE}" in one for one in found)
