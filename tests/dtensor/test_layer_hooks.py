"""Layers whose inputs and outputs are laid out: what Keras has attached to these, what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

from ..parity import assert_close, compile_all, fit_all

pytestmark = pytest.mark.usefixtures("float64")
IDS = np.random.default_rng(0).integers(0, 5, size=(8, 4))
Y = np.random.default_rng(1).normal(size=(8, 2))
HEAD = {".*head/kernel": ("model", None)}


@keras.saving.register_keras_serializable("test_layer_hooks")
class Pooled(layers.Layer):
    """Hands its input on to a layer that finds the mask on it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pool = layers.GlobalAveragePooling1D()

    def call(self, x: Any) -> Any:
        return self.pool(x)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        return None


def model_of(table: layers.Layer, pooling: layers.Layer) -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    return keras.Model(inputs, layers.Dense(2, name="head")(pooling(table(inputs))))


def attached_by_the_call() -> keras.Model:
    """`ReversibleEmbedding` has no `compute_mask`: its call attaches the mask itself."""
    table = layers.ReversibleEmbedding(5, 4, mask_zero=True, name="table")
    return model_of(table, layers.GlobalAveragePooling1D())


def of_a_declared_input() -> keras.Model:
    pooled = Pooled()
    kdist.shard(pooled, in_strategy=((1, 1, 2),))
    return model_of(layers.Embedding(5, 4, mask_zero=True, name="table"), pooled)


def of_a_declared_output() -> keras.Model:
    table = layers.ReversibleEmbedding(5, 4, mask_zero=True, name="table")
    kdist.shard(table, out_strategy=((1, 1, 2),))
    return model_of(table, layers.GlobalAveragePooling1D())


@pytest.mark.parametrize("build", [attached_by_the_call, of_a_declared_input, of_a_declared_output])
def test_masks_are_kept(build: Callable[[], keras.Model]) -> None:
    models = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = build()
        if parallel:
            config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=HEAD)
            model = kdist.parallelize(model, config)
        models.append(model)
    assert_close(*[model.predict(IDS, verbose=0) for model in models])
    compile_all(models)
    fit_all(models, lambda: (IDS, Y), batch_size=4)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_table_that_is_cut_by_columns_have_any_number_of_words(tied: bool) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        table = layers.ReversibleEmbedding(5, 4, tie_weights=tied, name="table")
        inputs = keras.Input((4,), dtype="int32")
        x = layers.Dense(4, "tanh", name="head")(table(inputs))
        return keras.Model(inputs, table(x, reverse=True))

    plain, model = build(), build()
    cuts = {**HEAD, ".*table/embeddings": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    kdist.parallelize(model, config)
    compile_all((plain, model))
    targets = np.random.default_rng(1).normal(size=(8, 4, 5))
    fit_all((plain, model), lambda: (IDS, targets), batch_size=4)
    assert kdist.inspect(model).fallbacks == ()


class Placed(layers.Layer):
    """Adds a weight to patches, as vision models say where each is."""

    def build(self, shape: Any) -> None:
        self.place = self.add_weight(shape=(1, *shape[1:]), name="place")

    def call(self, x: Any) -> Any:
        return x + self.place


def patches() -> keras.Model:
    """Three channels, which two devices cannot share."""
    x = inputs = keras.Input((4, 4, 3))
    x = Placed(name="placed")(layers.Conv2D(8, 2, strides=2, name="patches")(x))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(x)))


def test_channels_that_what_reads_a_convolution_cuts() -> None:
    """DTensor would cut the channels of the convolution's input too, and fails."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4, 4, 3)), rng.normal(size=(8, 2))
    models = []
    for cut in (None, {"placed/place": (None, None, None, "model")}):
        keras.utils.set_random_seed(0)
        models.append(patches())
        if cut is not None:
            mesh = kdist.mesh(data=2, model=2)
            kdist.parallelize(models[-1], kdist.ParallelConfig(mesh=mesh, layout_map=cut))
    compile_all(models)
    fit_all(models, lambda: (x, y), batch_size=8)
    found = kdist.inspect(models[1])
    assert found.islands == () and found.fallbacks == ()
