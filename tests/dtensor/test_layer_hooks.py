"""Layers whose inputs and outputs are laid out: what Keras has attached to these, what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ..parity import assert_close, compile_all, fit_all
from ..ragged_words import RAGGED_IDS, TEXTS, RaggedWords

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


class OwnConvolution(layers.Conv1D):
    """Has a name of its own for what it takes."""

    def call(self, seen: Any) -> Any:
        return super().call(seen)


class OwnPooling(layers.MaxPooling1D):
    def call(self, seen: Any) -> Any:
        return super().call(seen)


class OwnNorm(layers.BatchNormalization):
    def call(self, seen: Any, training: bool | None = None) -> Any:
        return super().call(seen, training=training)


class OwnTexts(layers.TextVectorization):
    def call(self, texts: Any) -> Any:
        return super().call(texts)


class Named(keras.Model):
    """Calls its layers with what they take by name."""

    def __init__(self) -> None:
        super().__init__(name="named")
        self.texts = OwnTexts(vocabulary=["a", "b", "c"], output_sequence_length=4, name="texts")
        self.table = layers.Embedding(6, 8, name="table")
        self.convolution = OwnConvolution(8, 3, padding="same", use_bias=False, name="convolution")
        self.pool, self.norm = OwnPooling(2, name="pool"), OwnNorm(name="norm")
        self.up = kdist.shard(layers.Dense(8, name="up"), in_strategy=((1, 1, 2), (1, 1)))
        self.head = layers.Dense(2, name="head")

    def call(self, texts: Any, training: bool | None = None) -> Any:
        x = self.table(inputs=self.texts(texts=texts))
        x = self.pool(seen=self.convolution(seen=x))
        x = self.up(inputs=self.norm(seen=x, training=training))
        return self.head(inputs=keras.ops.mean(x, axis=1))


def test_inputs_given_by_name() -> None:
    models = []
    texts = np.array([["a b c c"], ["c"], ["b x"], ["a a c"]])
    for mesh in (None, kdist.mesh(model=2)):
        keras.utils.set_random_seed(0)
        models.append(Named())
        models[-1](tf.constant(texts))
        if mesh is not None:
            kdist.parallelize(models[-1], kdist.ParallelConfig(mesh=mesh, layout_map=HEAD))
    compile_all(models)
    fit_all(models, lambda: (tf.constant(texts), Y[:4]), batch_size=4)


def test_declared_inputs_given_by_name() -> None:
    """They are laid out as those by position are."""
    inputs = keras.Input((4,))
    up = kdist.shard(layers.Dense(4, name="up"), in_strategy=((1, 2), (2, 1)))
    model = keras.Model(inputs, layers.Dense(2, name="head")(up(inputs=inputs)))
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map={})
    kdist.parallelize(model, config).compile("sgd", "mse")
    assert kdist.inspect(model).count("all-gather") == 0


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ragged_tensors_are_left_alone(texts: bool, sequence_parallel: bool) -> None:
    """What a layer gives has no layout then, and no sizes to tell."""
    x = TEXTS if texts else RAGGED_IDS
    cuts: Any = {**HEAD, ".*table/embeddings": (None, "model")}
    if sequence_parallel:
        cuts[".*table/embeddings"] = ("model", None)
    models = []
    for mesh in (None, kdist.mesh(data=2, model=2)):
        keras.utils.set_random_seed(0)
        models.append(RaggedWords(texts))
        models[-1](tf.constant(x))
        if mesh is not None:
            config = kdist.ParallelConfig(
                mesh=mesh, layout_map=cuts, sequence_parallel=sequence_parallel
            )
            kdist.parallelize(models[-1], config)
    compile_all(models)
    fit_all(models, lambda: (tf.constant(x), Y[:4]), batch_size=4)


class Finer(layers.Conv2D):
    """Makes four places of each: a sub-pixel convolution."""

    def call(self, inputs: Any) -> Any:
        return tf.nn.depth_to_space(super().call(inputs), 2)

    def compute_output_shape(self, input_shape: Any) -> Any:
        rows, height, width, channels = super().compute_output_shape(input_shape)
        return rows, 2 * height, 2 * width, channels // 4


class Weighed(layers.Conv2D):
    """Gives a weight of each place too, of one channel."""

    def call(self, inputs: Any) -> Any:
        made = super().call(inputs)
        return made, tf.sigmoid(tf.reduce_mean(made, -1, keepdims=True))

    def compute_output_shape(self, input_shape: Any) -> Any:
        shape = super().compute_output_shape(input_shape)
        return shape, (*shape[:-1], 1)


def own_convolutions() -> keras.Model:
    x = inputs = keras.Input((4, 4, 4))
    x, weight = Weighed(8, 3, padding="same", name="weighed")(x)
    x = Finer(12, 1, name="finer")(keras.ops.multiply(x, weight))
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def test_convolutions_of_ones_own_give_other_tensors() -> None:
    """Three channels and one cannot be cut as the filters are; the model stays cut nonetheless."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4, 4, 4)), rng.normal(size=(8, 2))
    filters = {f"{name}/kernel": (None, None, None, "model") for name in ("weighed", "finer")}
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(own_convolutions())
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=filters)
    kdist.parallelize(models[1], config)
    compile_all(models)
    fit_all(models, lambda: (x, y), batch_size=8)
    found = kdist.inspect(models[1])
    assert found.fallbacks == () and found.gathered == ()
