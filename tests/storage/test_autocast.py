"""Layers that compute in 16 bits: what they read and write of placed weights keeps its own bits."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from ..parity import both_meshes, copies

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
THIRD = np.float32(1 / 3)  # no number of 16 bits
CUTS = {"(.*/)?(kept|moved|scale)": ("model",)}


class Kept(keras.layers.Layer):
    """Has a weight that it reads in full precision, and state that it writes."""

    def build(self, shape: Any) -> None:
        third = keras.initializers.Constant(THIRD)
        width = shape[-1:]
        self.kept = self.add_weight(
            shape=width, initializer=third, autocast=False, trainable=False, name="kept"
        )
        self.moved = self.add_weight(
            shape=width, initializer="zeros", trainable=False, name="moved"
        )
        self.scale = self.add_weight(shape=width, initializer=third, name="scale")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.moved.assign(ops.full((4,), THIRD))
        assert self.scale.dtype == "bfloat16" and self.kept.dtype == "float32"
        return ops.cast(inputs * self.scale, "float32") * self.kept


def built(axes: dict[str, int] | None, born: bool = False) -> keras.Model:
    layers = [keras.Input((4,)), Kept(dtype="mixed_bfloat16", name="layer")]
    if axes is None:
        return keras.Sequential(layers)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), layout_map=CUTS if "model" in axes else None
    )
    if not born:
        return kdist.parallelize(keras.Sequential(layers), config)
    with kdist.scope(config):
        return keras.Sequential([keras.Input((4,)), Kept(dtype="mixed_bfloat16", name="layer")])


@both_meshes
@pytest.mark.parametrize("born", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_calls_outside_of_a_step(axes: dict[str, int], born: bool, traced: bool) -> None:
    """Read whole, a weight without autocast has its bits; written there, state keeps its own."""
    expected = built(None)(X)
    model = built(axes, born)
    call = tf.function(lambda x: model(x, training=True)) if traced else model
    np.testing.assert_array_equal(call(X), expected)
    model(X, training=True)
    layer = model.get_layer("layer")
    for variable in (layer.kept, layer.moved):
        np.testing.assert_array_equal(variable.numpy(), np.full(4, THIRD))
        for index, part in copies(variable):
            np.testing.assert_array_equal(part, np.full(4, THIRD)[index])


@both_meshes
@pytest.mark.parametrize("eager", [False, True])
def test_policies_of_single_layers(axes: dict[str, int], eager: bool) -> None:
    """A normalization in 16 bits, whose weights have 32 in any case, between layers in 32."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        norm = keras.layers.LayerNormalization(dtype="mixed_bfloat16")
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), norm])

    plain, model = build(), build()
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes)))
    for one in (plain, model):
        one.compile("sgd", "mse", metrics=["mae"], run_eagerly=eager)
    losses = [one.train_on_batch(X, X) for one in (plain, model)]
    np.testing.assert_allclose(*losses, rtol=2**-6)
    for one, other in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-3)
