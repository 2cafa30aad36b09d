"""Models that look texts up themselves, as keras.io's examples of structured data do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kdist
from kdist.graphs.executed import largest, watch

import keras
import numpy as np
import pytest
import tensorflow as tf

from .case import CLASSES, FEED_FORWARD, Case, labels, weights
from .features import BY_NAME as FEATURES
from .harness import compare, precision
from .matrix import MESHES, spread
from .optimizer_zoo import OPTIMIZERS
from .test_own_look_ups import OVER, on

WORDS = ("good", "bad", "film", "so", "not", "very")
KINDS = ("fun", "war", "art")


def _model() -> keras.Model:
    text = keras.Input((), dtype="string", name="text")
    kind = keras.Input((1,), dtype="string", name="kind")
    x = keras.layers.TextVectorization(output_sequence_length=4, vocabulary=WORDS)(text)
    x = keras.layers.Embedding(len(WORDS) + 2, 8, name="words")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    counts = keras.layers.TextVectorization(
        output_mode="tf_idf", vocabulary=WORDS, idf_weights=np.linspace(0.5, 1.5, len(WORDS))
    )(text)
    hashed = keras.layers.Hashing(7, output_mode="one_hot")(kind)
    known = keras.layers.StringLookup(vocabulary=KINDS, output_mode="one_hot")(kind)
    hashed = keras.layers.Flatten()(hashed)
    given = [keras.ops.cast(one, x.dtype) for one in (counts, hashed, known)]
    x = keras.layers.Concatenate()([x, *given])
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    outputs = keras.layers.Dense(CLASSES, name="head")(x)
    return keras.Model({"text": text, "kind": kind}, outputs, name="texts")


def _data(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(0, 7))) for _ in range(samples)]
    kinds = rng.choice([*KINDS, "new"], (samples, 1))
    x = {"text": tf.constant(texts), "kind": tf.constant(kinds)}  # Keras takes no arrays of texts
    return x, labels(rng, samples), weights(rng, samples)


class Reviews(keras.Model):
    """Looks up in its own call; pads are masked."""

    def __init__(self) -> None:
        super().__init__(name="reviews")
        self.vectorize = keras.layers.TextVectorization(output_sequence_length=4, vocabulary=WORDS)
        self.words = keras.layers.Embedding(len(WORDS) + 2, 8, mask_zero=True, name="words")
        self.mean = keras.layers.GlobalAveragePooling1D()
        self.lookup = keras.layers.StringLookup(vocabulary=KINDS, output_mode="one_hot")
        self.up = keras.layers.Dense(16, "gelu", name="up")
        self.down = keras.layers.Dense(8, name="down")
        self.head = keras.layers.Dense(CLASSES, name="head")

    def call(self, x: Any) -> Any:
        mean = self.mean(self.words(self.vectorize(x["text"])))
        kinds = keras.ops.cast(self.lookup(x["kind"]), mean.dtype)
        return self.head(self.down(self.up(keras.ops.concatenate([mean, kinds], -1))))


def _subclassed() -> keras.Model:
    model = Reviews()
    model({key: value[:1] for key, value in _data(0, 1)[0].items()})
    return model


@keras.saving.register_keras_serializable("texts")
class Deep(keras.layers.Layer):
    """Looks up in a branch and in the turns of a loop, and keeps its table in a list."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        keys = tf.lookup.KeyValueTensorInitializer(WORDS, np.arange(len(WORDS)))
        self.kept = [tf.lookup.StaticHashTable(keys, len(WORDS))]

    def compute_output_spec(self, texts: Any) -> Any:
        return keras.KerasTensor((*texts.shape, 2), self.compute_dtype)

    def call(self, texts: Any) -> Any:
        zeros = tf.zeros(tf.shape(texts), tf.int64)
        table = self.kept[0]
        chosen = tf.cond(tf.shape(texts)[0] > 0, lambda: table.lookup(texts), lambda: zeros)
        _, looped = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, sums: (i + 1, sums + table.lookup(texts)),
            (0, zeros),
            shape_invariants=(tf.TensorShape([]), texts.shape),
        )
        found = tf.cast(tf.stack([chosen, looped], -1), self.compute_dtype)
        return tf.ensure_shape(found, (*texts.shape, 2))


def _deep() -> keras.Model:
    kind = keras.Input((1,), dtype="string", name="kind")
    x = keras.layers.Flatten()(Deep(name="deep")(kind))
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model(kind, keras.layers.Dense(CLASSES, name="head")(x), name="deep_texts")


def _words(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    x = tf.constant(rng.choice([*WORDS, "new"], (samples, 1)))
    return x, labels(rng, samples), weights(rng, samples)


TEXTS = Case(name="texts", build=_model, data=_data, layout_map=FEED_FORWARD)
DEEP = Case(name="deep", build=_deep, data=_words, layout_map=FEED_FORWARD)
INSIDE = [("data2", True), ("data2", False), ("data2_model2", True), ("pipe2_data2", True)]
SUBCLASSED = Case(name="reviews", build=_subclassed, data=_data, layout_map=FEED_FORWARD)


@pytest.mark.parametrize(
    ("mesh", "level", "feature"),
    spread(
        [
            (mesh, level, feature)
            for mesh in (*OVER, "data4", "model2")
            for level in ("level0", "level1", "level2", "level3")
            for feature in (None, "sample_weight", "gradient_accumulation", "steps_per_execution")
        ],
        [
            ("data2_model2", "level0", None),
            ("data2_model2", "level3", "gradient_accumulation"),
            ("pipe2_data2", "level0", "sample_weight"),
            ("pipe2_data2_model2", "level3", None),
            ("data4", "level3", "steps_per_execution"),
        ],
        quick=4,
    ),
)
@pytest.mark.filterwarnings("error:.*(mixes rows|gathered weights)")
def test_they_equal_one_device(mesh: str, level: str, feature: str | None) -> None:
    compare(
        TEXTS,
        {**MESHES, **OVER}[mesh],
        optimizer=OPTIMIZERS["adam"],
        samples=19,  # the last batch has other rows
        features=[] if feature is None else [FEATURES[feature]],
        config=on(mesh, level) if mesh in OVER else on("data2", level),
        source="dataset",
    )


@pytest.mark.parametrize(
    ("mesh", "level"),
    spread(
        [
            (mesh, level)
            for mesh in ("data4", "data2_model2")
            for level in ("level0", "level1", "level2", "level3")
        ],
        [("data2_model2", "level2")],
        quick=1,
    ),
)
@pytest.mark.filterwarnings("error:.*(mixes rows|gathered weights)")
def test_in_the_call_of_a_subclassed_model_with_masks(mesh: str, level: str) -> None:
    compare(
        SUBCLASSED,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        samples=19,
        config=on("data2", level),
        source="dataset",
    )


@pytest.mark.parametrize(
    ("mesh", "overlap"),
    spread(INSIDE, INSIDE, quick=2),
)
def test_in_functions_inside(mesh: str, overlap: bool) -> None:
    """Over processes each replica, and each micro-batch, waits for its own look-ups."""
    compare(
        DEEP,
        {**MESHES, **OVER}[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={**on(mesh, "level0"), "fusion": kdist.FusionConfig(overlap=overlap)},
        source="dataset",
    )


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    spread(
        [(mesh, f"mixed_{half}") for mesh in OVER for half in ("float16", "bfloat16")],
        [("data2_model2", "mixed_bfloat16")],
        quick=1,
    ),
)
@pytest.mark.filterwarnings("error:.*(mixes rows|gathered weights)")
def test_in_half_precision(mesh: str, dtype: str) -> None:
    compare(
        TEXTS,
        OVER[mesh],
        optimizer=OPTIMIZERS["loss_scale_sgd" if dtype == "mixed_float16" else "sgd_momentum"],
        dtype=dtype,
        config=on(mesh, "level1"),
        source="dataset",
    )


@pytest.mark.filterwarnings("error:.*(mixes rows|gathered weights)")
def test_rows_that_an_axis_inside_cuts() -> None:
    compare(
        TEXTS,
        MESHES["data2_model2"],
        optimizer=OPTIMIZERS["adam"],
        config={"batch_semantics": "global"},
        source="dataset",
    )


@pytest.fixture
def float64() -> Iterator[None]:
    with precision("float64"):
        yield


def _words_alone(**options: Any) -> keras.Model:
    text = keras.Input((), dtype="string", name="text")
    x = keras.layers.TextVectorization(vocabulary=WORDS, **options)(text)
    x = keras.layers.Embedding(len(WORDS) + 2, 8, mask_zero=True, name="words")(x)
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model({"text": text}, keras.layers.Dense(CLASSES, name="head")(x))


def _texts_alone(seed: int, samples: int) -> Any:
    x, *others = _data(seed, samples)
    return {"text": x["text"]}, *others


@pytest.mark.parametrize("mesh", ["data2", "pipe2_data2", "data2_model2"])
def test_as_many_words_as_the_longest_has(mesh: str) -> None:
    """A replica's longest may be another one than the batch's, which the mask hides."""
    case = Case(name="words", build=_words_alone, data=_texts_alone, layout_map=FEED_FORWARD)
    with pytest.warns(
        UserWarning, match="mixes rows" if mesh != "data2_model2" else "values decide its shape"
    ):
        compare(
            case,
            {**MESHES, **OVER}[mesh],
            optimizer=OPTIMIZERS["adam"],
            config=on(mesh, "level0"),
            source="dataset",
        )


@pytest.mark.parametrize("mesh", ["data2_model2", "pipe2_data2"])
def test_an_unknown_word_is_an_error_where_it_is_one(mesh: str) -> None:
    kind = keras.Input((1,), dtype="string")
    x = keras.layers.StringLookup(vocabulary=KINDS, num_oov_indices=0, output_mode="one_hot")(kind)
    x = keras.layers.Dense(4, name="up")(keras.ops.cast(x, "float32"))
    model = keras.Model(kind, keras.layers.Dense(1, name="head")(x))
    layouts = {".*up/kernel": (None, "model")} if "model" in mesh else {}
    axes = {**MESHES, **OVER}[mesh]
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts, **on(mesh, "level0"))
    model = kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    known = tf.constant([["fun"], ["war"], ["art"], ["fun"]])
    y = tf.zeros([4, 1])
    assert np.isfinite(model.train_on_batch(known, y))
    with pytest.raises(tf.errors.InvalidArgumentError, match="vocabulary"):
        model.train_on_batch(tf.constant([["fun"], ["new"], ["art"], ["fun"]]), y)


@pytest.mark.parametrize("mesh", ["data2_model2", "pipe2_data2_model2"])
def test_texts_are_looked_up_once_a_slice(mesh: str) -> None:
    """Not on each device of it; in stages once per micro-batch, and not in the backward pass."""
    model = _words_alone(output_sequence_length=4)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**OVER[mesh]), layout_map=dict(FEED_FORWARD), **on(mesh, "level0")
    )
    model = kdist.parallelize(model, config)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y, _ = _texts_alone(0, 8)
    step = largest(watch(lambda: model.train_on_batch(x, tf.constant(y))))
    calls = 2 * (2 if "pipe" in mesh else 1)
    for operation in ("LookupTableFindV2", "StringSplitV2"):
        assert len(step.select(operation)) == calls


@pytest.mark.usefixtures("float64")
def test_each_size_of_a_batch_has_a_program() -> None:
    models = [_words_alone(output_sequence_length=4) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**MESHES["data2_model2"]), layout_map=dict(FEED_FORWARD)
    )
    kdist.parallelize(models[1], config)
    for model in models:
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.warns(UserWarning, match="8 shapes.*layers of texts have a program for each size"):
        for rows in range(2, 20, 2):
            x, y, _ = _texts_alone(rows, rows)
            plain, parallel = (model.train_on_batch(x, tf.constant(y)) for model in models)
            np.testing.assert_allclose(parallel, plain, rtol=1e-9)
