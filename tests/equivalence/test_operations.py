"""Every operation of Keras between two layers whose tensors are cut equals one device."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import ops

from .harness import precision
from .operations import OPERATIONS, Operation

DEFAULT = (
    "reshape",
    "get_item",
    "take_along_axis",
    "einsum",
    "sparsemax",
    "sparse_categorical_crossentropy",
)
"""Where cut dims are merged, sliced, looked up and contracted; two that DTensor gets wrong."""
STEPS = 2


class Between(keras.layers.Layer):
    """What an operation makes, weighted by place, as one number."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(name="between")
        self.operation = operation

    def call(self, x: Any, t: Any) -> Any:
        total = ops.cast(0.0, x.dtype)
        for made in keras.tree.flatten(self.operation(x, t)):
            y = ops.convert_to_tensor(made)
            if "complex" in keras.backend.standardize_dtype(y.dtype):
                y = ops.real(y) + ops.imag(y)
            y = ops.cast(y, x.dtype)
            places = ops.reshape(ops.arange(ops.size(y)), ops.shape(y))
            total += ops.sum(ops.tanh(y) * ops.cos(ops.cast(places, x.dtype)))
        return ops.mean(x, (1, 2))[:, None] + total

    def compute_output_spec(self, x: Any, t: Any) -> Any:
        return keras.KerasTensor((x.shape[0], 1), x.dtype)


def _trained(name: str, axes: dict[str, int]) -> list[Any]:
    """Losses, weights and predictions of a model around an operation."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6, 8))
    x = keras.layers.Dense(8, name="up")(inputs)
    y = Between(OPERATIONS[name])(x, keras.layers.Permute((2, 1))(x))
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(y))
    if axes:
        layouts = {"up/kernel": (None, "model"), "up/bias": ("model",)}
        config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts)
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    rng = np.random.default_rng(0)
    data = rng.normal(size=(4, 6, 8)), rng.normal(size=(4, 1))
    losses = [model.train_on_batch(*data) for _ in range(STEPS)]
    return [*losses, *model.get_weights(), model.predict(data[0], verbose=0)]


@pytest.mark.parametrize(
    "name",
    [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.long) for n in OPERATIONS],
)
def test_an_operation_on_what_is_cut_equals_one_device(name: str) -> None:
    with precision("float64"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = _trained(name, {}), _trained(name, {"model": 2})
    assert all(np.isfinite(one).all() for one in expected), "a row that cannot tell"
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)
