"""Small models, with data, that span what Keras users train.

Every model is built from explicitly named layers, so that a layout pattern and a failure message
can name a variable. Every width that a layout splits is divisible by 4, the widest `model` axis in
the suite. Everything runs in float64, where a difference between two correct programs is rounding
(about 1e-15) and a difference made by a wrong program is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

Layout = tuple[str | None, ...]
Data = tuple[Any, Any, Any]

TOKENS = 6
VOCABULARY = 16
WIDTH = 8
HEADS = 4
CLASSES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model of the zoo and everything needed to train it.

    Attributes:
        name: Unique name, used as test id.
        build: Makes a fresh, uncompiled model. Seed Keras first to make it deterministic.
        data: `data(seed, samples)` gives `(x, y, sample_weight)` as NumPy arrays or dicts of them.
        loss: `loss(reduction)` gives fresh losses in the structure that `compile` expects.
        metrics: Gives fresh metrics in the structure that `compile` expects.
        layout_map: Pattern of a variable path -> mesh axis (or None) of each of its dims.
        loss_weights: As `compile` expects.
        has_batchnorm: Training depends on how the batch is split.
        zero_gradient_paths: Patterns of variables whose true gradient is zero, so that only
            rounding moves them (the key bias: softmax ignores what all keys have in common).
        tags: What features may rely on: `labels` (one output with integer labels of shape
            `(n,)`), `masked`, `embedding`, `dict`, `dense` (a Dense layer of rank-2 input),
            `norm` (BatchNormalization), `binary` (one output, labels 0 and 1, logits).
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[int, int], Data]
    loss: Callable[[str], Any]
    metrics: Callable[[], Any]
    layout_map: Mapping[str, Layout]
    loss_weights: Any = None
    has_batchnorm: bool = False
    zero_gradient_paths: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()


def _sparse_loss(reduction: str) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _accuracy() -> list[keras.metrics.Metric]:
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def _labels(rng: np.random.Generator, *shape: int, classes: int = CLASSES) -> np.ndarray:
    return rng.integers(0, classes, shape).astype("int32")


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    # Far from 1 and far from each other: an average that forgets them is visibly wrong.
    return rng.uniform(0.1, 3.0, shape)


# MLP ------------------------------------------------------------------------------------------


def _mlp() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    h = layers.Dense(16, activation="gelu", name="up")(x)
    x = layers.Add(name="residual")([x, layers.Dense(12, activation="tanh", name="down")(h)])
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="mlp")


def _shared_mlp() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    up = layers.Dense(16, activation="gelu", name="up")
    down = layers.Dense(12, activation="tanh", name="down")
    for i in range(3):
        x = layers.Add(name=f"residual_{i}")([x, down(up(x))])
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="shared_mlp")


def _mlp_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 12))
    return x, _labels(rng, samples), _weights(rng, samples)


FEED_FORWARD: Mapping[str, Layout] = {
    ".*up.*/kernel": (None, "model"),
    ".*up.*/bias": ("model",),
    ".*down.*/kernel": ("model", None),
}


# GPT ------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("equivalence")
class Positions(layers.Layer):
    """Adds a trained vector per position to inputs of shape `(batch, tokens, width)`."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=input_shape[1:], initializer="normal", name="table")

    def call(self, inputs: Any) -> Any:
        return inputs + self.table


def _block(x: Any, name: str, causal: bool) -> Any:
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"{name}_attention")
    h = layers.LayerNormalization(name=f"{name}_norm")(x)
    x = layers.Add(name=f"{name}_add")([x, attention(h, h, use_causal_mask=causal)])
    h = layers.LayerNormalization(name=f"{name}_feed_norm")(x)
    h = layers.Dense(2 * WIDTH, activation="gelu", name=f"{name}_up")(h)
    return layers.Add(name=f"{name}_feed_add")([x, layers.Dense(WIDTH, name=f"{name}_down")(h)])


def _gpt(tied: bool) -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    tokens = layers.ReversibleEmbedding(
        VOCABULARY, WIDTH, tie_weights=tied, embeddings_initializer="normal", name="vocabulary"
    )
    x = Positions(name="positions")(tokens(x))
    for i in range(2):
        x = _block(x, f"block{i}", causal=True)
    x = layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(inputs, tokens(x, reverse=True), name="gpt_tied" if tied else "gpt")


def _gpt_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    text = _labels(rng, samples, TOKENS + 1, classes=VOCABULARY)
    return text[:, :-1], text[:, 1:], _weights(rng, samples, TOKENS)


ATTENTION: Mapping[str, Layout] = {
    ".*attention/(query|key|value)/kernel": (None, "model", None),
    ".*attention/(query|key|value)/bias": ("model", None),
    ".*attention/attention_output/kernel": ("model", None, None),
}
KEY_BIAS = (".*attention/key/bias",)


# Encoder with masks ---------------------------------------------------------------------------


def _encoder() -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="vocabulary")(x)
    x = _block(x, "block0", causal=False)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="encoder")


def _encoder_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.integers(1, VOCABULARY, (samples, TOKENS)).astype("int32")
    # Lengths rise along the data, so that the parts of a batch hold unequal counts of valid tokens.
    lengths = 1 + (np.arange(samples) * TOKENS) // max(samples, 1) % TOKENS
    x[np.arange(TOKENS)[None, :] >= lengths[:, None]] = 0
    return x, _labels(rng, samples, TOKENS), _weights(rng, samples, TOKENS)


# Convolutions and BatchNormalization ----------------------------------------------------------


def _resnet() -> keras.Model:
    x = inputs = keras.Input((6, 6, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="stem")(x)
    x = layers.ReLU(name="stem_relu")(layers.BatchNormalization(momentum=0.7, name="stem_norm")(x))
    h = layers.Conv2D(8, 3, padding="same", use_bias=False, name="body")(x)
    h = layers.BatchNormalization(momentum=0.7, name="body_norm")(h)
    x = layers.ReLU(name="body_relu")(layers.Add(name="residual")([x, h]))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="resnet")


def _resnet_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    # A mean that drifts along the data: statistics of one part are far from the whole batch's.
    x = rng.normal(size=(samples, 6, 6, 3)) + np.linspace(-1, 1, samples)[:, None, None, None]
    return x, _labels(rng, samples), _weights(rng, samples)


# Recurrence -----------------------------------------------------------------------------------


def _lstm() -> keras.Model:
    x = inputs = keras.Input((5, 3), name="series")
    x = layers.LSTM(8, name="lstm")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="lstm")


def _lstm_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 5, 3)), _labels(rng, samples), _weights(rng, samples)


# Two inputs, two losses -----------------------------------------------------------------------


def _two_tower() -> keras.Model:
    user = keras.Input((6,), name="user")
    item = keras.Input((4,), name="item")
    towers = []
    for x in (user, item):
        h = layers.Dense(16, activation="relu", name=f"{x.name}_up")(x)
        towers.append(layers.Dense(WIDTH, name=f"{x.name}_down")(h))
    joint = layers.Multiply(name="joint")(towers)
    outputs = {
        "click": layers.Dense(1, name="click")(joint),
        "rating": layers.Dense(2, name="rating")(joint),
    }
    return keras.Model({"user": user, "item": item}, outputs, name="two_tower")


def _two_tower_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = {"user": rng.normal(size=(samples, 6)), "item": rng.normal(size=(samples, 4))}
    y = {
        "click": rng.integers(0, 2, (samples, 1)).astype("float64"),
        "rating": rng.normal(size=(samples, 2)),
    }
    return x, y, {"click": _weights(rng, samples), "rating": _weights(rng, samples)}


def _two_tower_loss(reduction: str) -> dict[str, keras.losses.Loss]:
    return {
        "click": keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction),
        "rating": keras.losses.MeanSquaredError(reduction=reduction),
    }


# Recommendation -------------------------------------------------------------------------------


def _dlrm() -> keras.Model:
    numbers = keras.Input((4,), name="numbers")
    ids = {f"id{i}": keras.Input((), dtype="int32", name=f"id{i}") for i in range(3)}
    vectors = [layers.Dense(WIDTH, activation="relu", name="bottom_up")(numbers)]
    for (name, value), rows in zip(ids.items(), (12, 16, 8), strict=True):
        vectors.append(layers.Embedding(rows, WIDTH, name=f"{name}_table")(value))
    pairs = [
        layers.Dot(axes=1, name=f"dot_{i}_{j}")([vectors[i], vectors[j]])
        for i in range(4)
        for j in range(i)
    ]
    x = layers.Concatenate(name="interactions")([vectors[0], *pairs])
    x = layers.Dense(16, activation="relu", name="top_up")(x)
    x = layers.Dense(8, activation="tanh", name="top_down")(x)
    logit = layers.Dense(1, name="logit")(x)
    return keras.Model({"numbers": numbers, **ids}, logit, name="dlrm")


def _dlrm_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x: dict[str, np.ndarray] = {"numbers": rng.normal(size=(samples, 4))}
    for i, rows in enumerate((12, 16, 8)):
        x[f"id{i}"] = rng.integers(0, rows, samples).astype("int32")
    return x, rng.integers(0, 2, (samples, 1)).astype("float64"), _weights(rng, samples)


def _tags(*names: str) -> frozenset[str]:
    return frozenset(names)


MLP = Case(
    name="mlp",
    build=_mlp,
    data=_mlp_data,
    loss=_sparse_loss,
    metrics=_accuracy,
    layout_map=FEED_FORWARD,
    tags=_tags("labels", "dense"),
)
SHARED_MLP = dataclasses.replace(MLP, name="shared_mlp", build=_shared_mlp)
GPT = Case(
    name="gpt",
    build=lambda: _gpt(tied=False),
    data=_gpt_data,
    loss=_sparse_loss,
    metrics=_accuracy,
    layout_map={**FEED_FORWARD, **ATTENTION, "vocabulary/embeddings": ("model", None)},
    zero_gradient_paths=KEY_BIAS,
    tags=_tags("embedding"),
)
GPT_TIED = dataclasses.replace(GPT, name="gpt_tied", build=lambda: _gpt(tied=True))
ENCODER = Case(
    name="encoder",
    build=_encoder,
    data=_encoder_data,
    loss=_sparse_loss,
    metrics=_accuracy,
    layout_map={**FEED_FORWARD, **ATTENTION},
    zero_gradient_paths=KEY_BIAS,
    tags=_tags("embedding", "masked"),
)
RESNET = Case(
    name="resnet",
    build=_resnet,
    data=_resnet_data,
    loss=_sparse_loss,
    metrics=_accuracy,
    layout_map={"body/kernel": (None, None, None, "model"), "head/kernel": ("model", None)},
    has_batchnorm=True,
    tags=_tags("labels", "dense", "norm"),
)
LSTM = Case(
    name="lstm",
    build=_lstm,
    data=_lstm_data,
    loss=_sparse_loss,
    metrics=_accuracy,
    layout_map={".*lstm_cell/kernel": (None, "model"), "head/kernel": ("model", None)},
    tags=_tags("labels", "dense"),
)
TWO_TOWER = Case(
    name="two_tower",
    build=_two_tower,
    data=_two_tower_data,
    loss=_two_tower_loss,
    metrics=lambda: {
        "click": [keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
        "rating": [keras.metrics.MeanAbsoluteError(name="error")],
    },
    layout_map=FEED_FORWARD,
    loss_weights={"click": 0.7, "rating": 0.3},
    tags=_tags("dict", "dense"),
)
DLRM = Case(
    name="dlrm",
    build=_dlrm,
    data=_dlrm_data,
    loss=lambda reduction: keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction),
    metrics=lambda: [keras.metrics.AUC(from_logits=True, name="auc")],
    layout_map={**FEED_FORWARD, ".*_table/embeddings": ("model", None)},
    tags=_tags("dict", "embedding", "dense", "binary"),
)

ZOO: tuple[Case, ...] = (
    MLP,
    SHARED_MLP,
    GPT,
    GPT_TIED,
    ENCODER,
    RESNET,
    LSTM,
    TWO_TOWER,
    DLRM,
)
BY_NAME: Mapping[str, Case] = {case.name: case for case in ZOO}


def valid_tokens(x: np.ndarray) -> np.ndarray:
    """Count of tokens that `Embedding(mask_zero=True)` keeps, per example, shape `(n,)`."""
    return np.asarray(ops.sum(ops.cast(ops.not_equal(x, 0), "int32"), axis=1))
