"""What recompute saves where one block is called again and again, read from executed steps."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

WIDE, ROWS, CALLS = 64, 256, 6


class Block(keras.layers.Layer):
    """A feed-forward layer that adds to what it takes; `remat` has `keras.remat` run it."""

    def __init__(self, calls: int = 1, remat: bool = False) -> None:
        super().__init__(name="block")
        self.up = keras.layers.Dense(4 * WIDE, "gelu", name="up")
        self.down = keras.layers.Dense(WIDE, name="down")
        self.calls, self.remat = calls, remat

    def feed_forward(self, x: Any) -> Any:
        return x + self.down(self.up(x))

    def call(self, x: Any) -> Any:
        for _ in range(self.calls):
            x = keras.remat(self.feed_forward)(x) if self.remat else self.feed_forward(x)
        return x


def peak(axes: dict[str, int], block: Block, recompute: Any = None) -> int:
    """Activations of a step on the device that has the most."""
    x = inputs = keras.Input((WIDE,))
    for _ in range(CALLS // block.calls):
        x = block(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    cut = {
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", None),
    }
    layouts = cut if "model" in axes else None
    mesh = kdist.mesh(**axes)
    config = kdist.ParallelConfig(mesh=mesh, layout_map=layouts, recompute=recompute)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    model.train_on_batch(np.zeros((ROWS, WIDE), "float32"), np.zeros((ROWS, 4), "float32"))
    return max(one.activations or 0 for one in kdist.inspect(model, ROWS).memory)


AGAIN = kdist.RecomputeConfig(layers=["block"])


@pytest.mark.parametrize(
    "axes", [{"model": 2}, pytest.param({"data": 2}, marks=pytest.mark.long)], ids=str
)
def test_calls_of_a_shared_block_are_there_one_at_a_time(axes: dict[str, int]) -> None:
    """Their weights are in one chunk, so gates alone keep the calls apart."""
    assert peak(axes, Block(), AGAIN) <= 0.65 * peak(axes, Block())


@pytest.mark.parametrize(
    "axes", [{"data": 2}, pytest.param({"model": 2}, marks=pytest.mark.long)], ids=str
)
def test_functions_in_remat_are_there_one_at_a_time(axes: dict[str, int]) -> None:
    assert peak(axes, Block(CALLS, remat=True)) <= 0.65 * peak(axes, Block(CALLS))
