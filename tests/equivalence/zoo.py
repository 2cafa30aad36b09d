"""Small models, with data, that span what Keras users train.

Every model is built from explicitly named layers, so that a layout pattern and a failure message
can name a variable. Every width that a layout splits is divisible by 4, the widest `model` axis in
the suite. Everything runs in float64, where a difference between two correct programs is rounding
(about 1e-15) and a difference made by a wrong program is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import keras
import numpy as np
from keras import layers

from .attention_models import ENCODER, GPT, GPT_TIED, LSTM_ATTENTION, POST_NORM
from .case import CLASSES, FEED_FORWARD, WIDTH, Case, Data, labels, tags, weights

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
    return x, labels(rng, samples), weights(rng, samples)


# Shared and frozen layers ---------------------------------------------------------------------


def _siamese() -> keras.Model:
    """A nested model and a frozen layer, each called twice."""
    x = features = keras.Input((12,), name="features")
    x = layers.Dense(16, activation="gelu", name="up")(x)
    x = layers.Dense(WIDTH, activation="tanh", name="down")(x)
    tower = keras.Model(features, x, name="tower")
    fixed = layers.Dense(WIDTH, activation="tanh", trainable=False, name="fixed")
    left, right = keras.Input((12,), name="left"), keras.Input((12,), name="right")
    x = layers.Concatenate(name="joint")([fixed(tower(left)), fixed(tower(right))])
    outputs = layers.Dense(CLASSES, name="head")(x)
    return keras.Model({"left": left, "right": right}, outputs, name="siamese")


def _siamese_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = {side: rng.normal(size=(samples, 12)) for side in ("left", "right")}
    return x, labels(rng, samples), weights(rng, samples)


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
    return x, labels(rng, samples), weights(rng, samples)


def _narrow() -> keras.Model:
    """A block whose inner channels are cut, with all that may lie between two convolutions."""
    x = inputs = keras.Input((6, 6, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="expand")(x)
    x = layers.BatchNormalization(momentum=0.7, name="expand_norm")(x)
    x = layers.MaxPooling2D(2, 1, name="maxima")(layers.ReLU(name="expand_relu")(x))
    x = layers.DepthwiseConv2D(3, padding="same", activation="tanh", name="each")(x)
    x = layers.Conv2D(4, 2, name="project")(layers.UpSampling2D(2, name="larger")(x))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="narrow")


# Recurrence -----------------------------------------------------------------------------------


def _lstm() -> keras.Model:
    x = inputs = keras.Input((5, 3), name="series")
    x = layers.LSTM(8, name="lstm")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="lstm")


def _lstm_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 5, 3)), labels(rng, samples), weights(rng, samples)


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
    return x, y, {"click": weights(rng, samples), "rating": weights(rng, samples)}


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
    return x, rng.integers(0, 2, (samples, 1)).astype("float64"), weights(rng, samples)


MLP = Case(
    name="mlp",
    build=_mlp,
    data=_mlp_data,
    layout_map=FEED_FORWARD,
    tags=tags("labels", "dense"),
)
SHARED_MLP = dataclasses.replace(MLP, name="shared_mlp", build=_shared_mlp)
SIAMESE = Case(
    name="siamese",
    build=_siamese,
    data=_siamese_data,
    layout_map=FEED_FORWARD,
    tags=tags("labels", "dict", "dense"),
)
RESNET = Case(
    name="resnet",
    build=_resnet,
    data=_resnet_data,
    layout_map={"body/kernel": (None, None, None, "model"), "head/kernel": ("model", None)},
    has_batchnorm=True,
    tags=tags("labels", "dense", "norm"),
)
NARROW = Case(
    name="narrow",
    build=_narrow,
    data=_resnet_data,
    layout_map={
        "expand/kernel": (None, None, None, "model"),
        "expand_norm/.*": ("model",),
        "each/kernel": (None, None, "model", None),
        "each/bias": ("model",),
        "project/kernel": (None, None, "model", None),
    },
    has_batchnorm=True,
    tags=tags("labels", "dense", "norm"),
)
LSTM = Case(
    name="lstm",
    build=_lstm,
    data=_lstm_data,
    layout_map={".*lstm_cell/kernel": (None, "model"), "head/kernel": ("model", None)},
    tags=tags("labels", "dense"),
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
    tags=tags("dict", "dense"),
)
DLRM = Case(
    name="dlrm",
    build=_dlrm,
    data=_dlrm_data,
    loss=lambda reduction: keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction),
    metrics=lambda: [keras.metrics.AUC(from_logits=True, name="auc")],
    layout_map={**FEED_FORWARD, ".*_table/embeddings": ("model", None)},
    tags=tags("dict", "embedding", "dense", "binary"),
)

ZOO: tuple[Case, ...] = (
    MLP,
    SHARED_MLP,
    GPT,
    GPT_TIED,
    ENCODER,
    POST_NORM,
    LSTM_ATTENTION,
    SIAMESE,
    RESNET,
    LSTM,
    TWO_TOWER,
    DLRM,
    NARROW,
)
BY_NAME: Mapping[str, Case] = {case.name: case for case in ZOO}
