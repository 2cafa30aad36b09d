"""Weights that a function with a gradient of its own reads train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from .harness import precision

STEPS = 3
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({"data": 2}, {}),
    "level3": ({"data": 2}, {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}),
    "inner": ({"data": 2, "model": 2}, {}),
    "pipe": ({"pipe": 2, "data": 2}, {"pipeline": kdist.PipelineConfig(micro_batches=2)}),
}


class Own(keras.layers.Layer):
    """A dense layer whose gradient is twice what it would be.

    Args:
        way: "captured": the gradient uses the tensors of the forward pass; "read": it reads the
            weights again; "tape": it runs the forward pass again under a tape; "given": weights
            are arguments of the function.
    """

    def __init__(self, way: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way = way

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.bias = self.add_weight(shape=(8,), name="bias")
        self.seeds = keras.random.SeedGenerator(1)

    def _gradient(self, x: Any, kernel: Any, d: Any, variables: Any) -> Any:
        if self.way == "tape":
            with tf.GradientTape() as tape:
                tape.watch([x, *variables])
                y = tf.matmul(x, tf.convert_to_tensor(self.kernel)) + self.bias
            found = tape.gradient(y, [x, *variables], output_gradients=2.0 * d)
            return found[0], found[1:]
        if self.way == "read":
            kernel = tf.convert_to_tensor(self.kernel)
        of_kernel, of_bias = tf.matmul(x, d, transpose_a=True), tf.reduce_sum(d, 0)
        by_name = {"kernel": 2.0 * of_kernel, "bias": 2.0 * of_bias}
        # By name: the bias comes first.
        return 2.0 * tf.matmul(d, kernel, transpose_b=True), [by_name["bias"], by_name["kernel"]]

    def _given(self, x: Any) -> Any:
        @tf.custom_gradient
        def doubled(x: Any, kernel: Any, bias: Any) -> tuple[Any, Callable]:
            def gradient(d: Any) -> Any:
                of_kernel = 2.0 * tf.matmul(x, d, transpose_a=True)
                of_x = 2.0 * tf.matmul(d, kernel, transpose_b=True)
                return of_x, of_kernel, 2.0 * tf.reduce_sum(d, 0)

            return tf.matmul(x, kernel) + bias, gradient

        # Keras's function gives a variable back as it is.
        return doubled(x, self.kernel, keras.ops.convert_to_tensor(self.bias))

    def call(self, x: Any) -> Any:
        if self.way == "given":
            self.seeds.next()
            return self._given(x)

        @tf.custom_gradient
        def doubled(x: Any) -> tuple[Any, Callable]:
            kernel = tf.convert_to_tensor(self.kernel)
            self.seeds.next()

            def gradient(d: Any, variables: Any = None) -> Any:
                assert [tuple(v.shape) for v in variables] == [(8,), (8, 8)]
                return self._gradient(x, kernel, d, variables)

            return tf.matmul(x, kernel) + self.bias, gradient

        return doubled(x)


def _trained(way: str, mesh: str | None) -> list[Any]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, "tanh", name="first"),
        Own(way, name="own"),
        keras.layers.Dense(8, "tanh", name="third"),
        keras.layers.Dense(1, name="last"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    if mesh is not None:
        axes, options = MESHES[mesh]
        if "model" in axes:
            options = options | {
                "layout_map": {".*first/kernel": (None, "model"), ".*own/kernel": ("model", None)}
            }
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 8)), rng.normal(size=(8, 1))
    losses = [model.train_on_batch(x, y) for _ in range(STEPS)]
    return [*losses, *(np.asarray(w) for w in model.get_weights())]


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("way", ["captured", "read", "tape", "given"])
def test_weights_that_are_read_train_as_on_one_device(way: str, mesh: str) -> None:
    # In plain Keras, a gradient that reads a weight may do so after its update: values differ from
    # run to run. They are those of tensors from the forward pass.
    with precision("float64"):
        expected, found = _trained("captured", None), _trained(way, mesh)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)


def test_a_weight_without_a_gradient_is_refused() -> None:
    class Layer(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(4,), name="factor")

        def call(self, x: Any) -> Any:
            @tf.custom_gradient
            def scaled(x: Any) -> tuple[Any, Callable]:
                return x * tf.convert_to_tensor(self.factor), lambda d, variables: (d, [None])

            return scaled(x)

    model = keras.Sequential([keras.Input((4,)), Layer(name="scaled"), keras.layers.Dense(1)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd", "mse")
    wrong = "tape.watch.*Received: no gradient of .*scaled/factor"
    with pytest.raises(ValueError, match=wrong):
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 1)))
