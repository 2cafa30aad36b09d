"""Batches of many shapes over inner axes: few compilations, and the numbers of one plain device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import kdist
from kdist.dtensor import call, expansion
from kdist.runtime.mesh_step import MeshStep

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

pytestmark = pytest.mark.usefixtures("float64")
long = pytest.mark.long
WORDS, WIDTH = 40, 8
ATTENTION = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
FILTERS = {".*filters/kernel": (None, None, None, "model"), ".*up/kernel": ("model", None)}
UP = {".*up/kernel": (None, "model")}


class Counts:
    """How often steps were traced, and programs lowered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traces = self.lowered = 0
        cut, lower = MeshStep.cut, call.lower

        def counted_cut(*args: Any) -> Any:
            self.traces += not tf.executing_eagerly()
            return cut(*args)

        def counted_lower(*args: Any) -> Any:
            self.lowered += 1
            return lower(*args)

        monkeypatch.setattr(MeshStep, "cut", counted_cut)
        monkeypatch.setattr(call, "lower", counted_lower)
        monkeypatch.setattr(expansion, "lower", counted_lower)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@keras.saving.register_keras_serializable("test_shapes")
class Positions(layers.Layer):
    """Adds a vector per position: what a table has for as many as there are."""

    supports_masking = True

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(64, shape[-1]), name="table")

    def call(self, x: Any) -> Any:
        return x + self.table[: ops.shape(x)[1]]


def text_model() -> keras.Model:
    """Masks, causal attention, positions, a prediction per word and one per text."""
    words = keras.Input((None,), dtype="int32", name="words")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True, name="table")(words)
    x = Positions(name="positions")(x)
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    x = layers.Add(name="sum")([x, attention(x, x, use_causal_mask=True)])
    h = layers.Dense(16, "gelu", name="up")(layers.LayerNormalization(name="norm")(x))
    x = layers.Add(name="residual")([x, layers.Dense(WIDTH, name="down")(h)])
    return keras.Model(words, layers.Dense(WORDS, name="head")(x))


def text(rows: int, length: int) -> tuple[Any, Any]:
    random = np.random.default_rng(100 * length + rows)
    words = random.integers(1, WORDS, (rows, length))
    words[np.arange(length)[None] >= random.integers(1, length + 1, (rows, 1))] = 0
    return words, random.integers(0, WORDS, (rows, length))


def image_model() -> keras.Model:
    images = keras.Input((None, None, 3), name="images")
    x = layers.Conv2D(8, 3, strides=2, padding="same", name="filters")(images)
    x = layers.MaxPooling2D(2, padding="same", name="pool")(layers.ReLU(name="relu")(x))
    x = layers.Conv2D(8, 3, name="more_filters")(x)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(images, layers.Dense(4, name="up")(x))


def images(rows: int, size: int) -> tuple[Any, Any]:
    random = np.random.default_rng(100 * size + rows)
    return random.normal(size=(rows, size, size + size % 3, 3)), random.integers(0, 4, rows)


def pair(
    build: Callable[[], keras.Model],
    cut: dict[str, Any],
    options: dict[str, Any] | None = None,
    **axes: int,
) -> tuple[keras.Model, keras.Model]:
    """A model on one device, and over a mesh, compiled."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(build())
    axes = axes or {"data": 2, "model": 2}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cut, **(options or {}))
    kdist.parallelize(models[1], config)
    for model in models:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss, weighted_metrics=["accuracy"])
    return models[0], models[1]


def train(models: Any, batches: Iterator[Any]) -> None:
    """Trains on batches, and compares."""
    for x, y in batches:
        plain, parallel = (model.train_on_batch(x, y) for model in models)
        np.testing.assert_allclose(parallel, plain, rtol=1e-9, err_msg=str(x.shape))
    for a, b in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)


def epochs(make: Callable, shapes: Any, counts: Counts, models: Any, most: int) -> None:
    """Three epochs over batches in random order: everything is compiled in the first."""
    random = np.random.default_rng(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(gathered weights|shapes of a batch)")
        train(models, (make(*shapes[i]) for i in random.permutation(len(shapes))))
        assert 3 <= counts.traces <= most
        counts.traces = counts.lowered = 0
        for _ in range(2):
            train(models, (make(*shapes[i]) for i in random.permutation(len(shapes))))
    assert counts.traces == counts.lowered == 0


IN_CHUNKS = {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}


@pytest.mark.parametrize("options", [None, pytest.param(IN_CHUNKS, marks=long)])
def test_24_lengths_are_compiled_at_most_6_times(counts: Counts, options: Any) -> None:
    shapes = [(5 if length % 6 == 0 else 8, length) for length in range(5, 29)]
    models = pair(text_model, ATTENTION, options)
    epochs(text, shapes, counts, models, 6)
    train(models, (text(rows, length) for rows, length in ((1, 1), (2, 40), (3, 2), (16, 63))))
    assert counts.traces == 0
    assert kdist.inspect(models[1]).fallbacks == ()


@long
def test_many_lengths_are_predicted_and_evaluated(counts: Counts) -> None:
    plain, parallel = pair(text_model, ATTENTION)
    for rows, length in ((4, 8), (5, 9), (3, 11), (7, 4), (2, 30), (1, 3), (4, 8)):
        x, y = text(rows, length)
        np.testing.assert_allclose(
            parallel.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            parallel.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-9
        )
    assert counts.traces <= 2 * 4


@long
def test_images_of_many_sizes(counts: Counts) -> None:
    shapes = [(5 if size % 7 == 0 else 6, size) for size in range(20, 32)]
    epochs(images, shapes, counts, pair(image_model, FILTERS), 6)


@long
@pytest.mark.parametrize("seed", range(3))
def test_random_shapes(seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = [(random.integers(1, 12), random.integers(1, 60)) for _ in range(40)]
    train(pair(text_model, ATTENTION), (text(*map(int, shape)) for shape in shapes))
    shapes = [(random.integers(1, 12), random.integers(16, 60)) for _ in range(30)]
    train(
        pair(image_model, FILTERS, data=2, model=4), (images(*map(int, shape)) for shape in shapes)
    )


@long
def test_stages_with_inner_axes(counts: Counts) -> None:
    options = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
    shapes = [(7 if length % 6 == 0 else 8, length) for length in range(6, 30, 2)]
    epochs(text, shapes, counts, pair(text_model, ATTENTION, options, data=2, model=2, pipe=2), 6)


@long
def test_a_batch_that_an_axis_cuts(counts: Counts) -> None:
    """Batches that divide share a program, others have programs of their own."""
    models = pair(text_model, ATTENTION, {"batch_semantics": "global"})
    shapes = [(7 if length == 12 else 8, length) for length in range(6, 30)]
    epochs(text, shapes, counts, models, 6)


def test_lengths_that_an_axis_cuts(counts: Counts) -> None:
    """Even lengths share a program; odd ones are not cut, and have programs of their own."""

    def build() -> keras.Model:
        inputs = keras.Input((None, 4))
        up = layers.Dense(8, "tanh", name="above")
        kdist.shard(up, in_strategy=((1, 2, 1), (1, 1)))
        return keras.Model(inputs, layers.Dense(WORDS, name="up")(up(inputs)))

    def batch(length: int) -> tuple[Any, Any]:
        random = np.random.default_rng(length)
        return random.normal(size=(4, length, 4)), random.integers(0, WORDS, (4, length))

    models = pair(build, UP, data=1, model=2)
    with warnings.catch_warnings(record=True):
        train(models, (batch(length) for length in (4, 6, 8, 10, 12, 5, 7, 20)))
        traces = counts.traces
        train(models, (batch(length) for length in (4, 6, 22, 18, 14, 5, 7, 2)))
    assert counts.traces == traces <= 6


class Folded(layers.Layer):
    """Folds words one after the other: in a loop, which DTensor cannot differentiate, if it must.

    The loop is built where the number of words is unknown; elsewhere there are operations for each.
    """

    def call(self, x: Any) -> Any:
        words = ops.transpose(x, (1, 0, 2))
        if words.shape[0] is None:
            return tf.foldl(lambda a, b: ops.tanh(a + b), words)
        return functools.reduce(lambda a, b: ops.tanh(a + b), tf.unstack(words))


def test_shapes_that_share_no_program_are_compiled_again(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist.runtime.by_shape.MAX_SHAPES", 3)

    def build() -> keras.Model:
        inputs = keras.Input((None, 4))
        return keras.Model(inputs, layers.Dense(4, name="up")(Folded()(inputs)))

    def batch(length: int) -> tuple[Any, Any]:
        random = np.random.default_rng(length)
        return random.normal(size=(4, length, 4)), random.integers(0, 4, 4)

    models = pair(build, UP, data=1, model=2)
    with pytest.warns(UserWarning, match="More than 3 shapes .*a program of their own") as said:
        train(models, (batch(length) for length in (2, 3, 4, 5, 6, 2, 3)))
    assert len([one for one in said if "shapes of a batch" in str(one.message)]) == 1
    before = counts.traces
    train(models, (batch(length) for length in (2, 3, 6, 3, 2)))
    assert counts.traces == before
    train(models, iter([batch(5)]))
    assert counts.traces == before + 1
    assert kdist.inspect(models[1]).fallbacks == ()


def test_a_size_that_was_the_same_in_all_examples() -> None:
    """Pooled over 8 words, 9 to 15 are one; 40 are five."""

    def build() -> keras.Model:
        inputs = keras.Input((None, 4))
        x = layers.AveragePooling1D(8, name="pool")(layers.Dense(8, name="up")(inputs))
        x = layers.Dense(6, name="down")(layers.Reshape((-1, 4))(x))
        return keras.Model(inputs, layers.GlobalMaxPooling1D(name="most")(x))

    def batch(length: int) -> tuple[Any, Any]:
        random = np.random.default_rng(length)
        return random.normal(size=(4, length, 4)), random.integers(0, 4, 4)

    models = pair(build, UP, data=1, model=2)
    train(models, (batch(length) for length in (9, 15, 12, 10, 40, 17, 33, 16)))


@long
def test_several_steps_per_execution_of_several_shapes(counts: Counts) -> None:
    def data() -> Iterator[Any]:
        for length in (6, 6, 6, 6, 9, 9, 8, 8, 8, 8, 4, 4, 4, 7, 11, 11, 11, 11, 11, 5):
            yield text(4, length)

    specs = tuple(tf.TensorSpec((None, None), tf.int64) for _ in range(2))
    models = pair(text_model, ATTENTION)
    history = []
    for model in models:
        model.compile(
            keras.optimizers.SGD(0.1, 0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=4 if model is models[1] else 1,
        )
        found = tf.data.Dataset.from_generator(data, output_signature=specs)
        history.append(model.fit(found, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(history[1], history[0], rtol=1e-9)
    for a, b in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)
    assert kdist.inspect(models[1]).fallbacks == ()
