"""Networks inside one model whose weights have the same paths, in other shapes."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

from ..parity import assert_same_weights

X = np.random.default_rng(0).normal(size=(16, 6))
Y = np.random.default_rng(1).normal(size=(16, 4))

pytestmark = pytest.mark.usefixtures("float64")


class Scale(keras.layers.Layer):
    """Has a kernel of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(name="up")
        self.shape = shape

    def build(self, _: Any) -> None:
        self.kernel = self.add_weight(shape=self.shape, name="kernel", initializer="ones")

    def call(self, x: Any) -> Any:
        return x * keras.ops.mean(self.kernel)


class Chain(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="chain")
        self.first = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, name="up")], name="net"
        )
        self.second = keras.Sequential([keras.Input((8,)), Scale(())], name="net")
        self.third = keras.Sequential([keras.Input((8,)), Scale((3, 5))], name="net")
        self.head = keras.layers.Dense(4, name="head")

    def call(self, x: Any) -> Any:
        return self.head(self.third(self.second(self.first(x))))


def chain(axes: dict[str, int] | None = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = Chain()
    model(X)
    if axes:
        model = kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_each_weight_has_a_layout_of_its_own(axes: dict[str, int], level: int) -> None:
    """A layout of one number of dims, by path, went to all of them."""
    cut = {"layout_map": {".*head/kernel": ("model", None)}} if "model" in axes else {}
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    found = chain(axes, optimizer=optimizer, **cut)
    assert len({v.path for v in found.weights}) < len(found.weights)
    assert_same_weights(chain(), found)
