"""Models with attention, causal or masked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from .case import (
    CLASSES,
    FEED_FORWARD,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Case,
    Data,
    Layout,
    labels,
    tags,
    weights,
)

HEADS = 4

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
    text = labels(rng, samples, TOKENS + 1, classes=VOCABULARY)
    return text[:, :-1], text[:, 1:], weights(rng, samples, TOKENS)


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


def _post_norm() -> keras.Model:
    """The block of the first transformer: what attention leaves of its input's mask is read."""
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="vocabulary")(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")
    x = layers.Add(name="add")([x, attention(x, x)])
    x = layers.LayerNormalization(name="norm")(x)
    h = layers.Dense(2 * WIDTH, activation="gelu", name="up")(x)
    x = layers.Add(name="feed_add")([x, layers.Dense(WIDTH, name="down")(h)])
    x = layers.LayerNormalization(name="feed_norm")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="post_norm")


def _lstm_attention() -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="vocabulary")(x)
    x = layers.LSTM(WIDTH, return_sequences=True, name="lstm")(x)
    x = layers.LayerNormalization(name="norm")(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")
    x = layers.Add(name="add")([x, attention(x, x)])
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="lstm_attention")


def _encoder_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.integers(1, VOCABULARY, (samples, TOKENS)).astype("int32")
    # Lengths rise along the data, so that the parts of a batch hold unequal counts of valid tokens.
    lengths = 1 + (np.arange(samples) * TOKENS) // max(samples, 1) % TOKENS
    x[np.arange(TOKENS)[None, :] >= lengths[:, None]] = 0
    return x, labels(rng, samples, TOKENS), weights(rng, samples, TOKENS)


GPT = Case(
    name="gpt",
    build=lambda: _gpt(tied=False),
    data=_gpt_data,
    layout_map={**FEED_FORWARD, **ATTENTION, "vocabulary/embeddings": ("model", None)},
    zero_gradient_paths=KEY_BIAS,
    tags=tags("embedding"),
)
GPT_TIED = dataclasses.replace(GPT, name="gpt_tied", build=lambda: _gpt(tied=True))
ENCODER = Case(
    name="encoder",
    build=_encoder,
    data=_encoder_data,
    layout_map={**FEED_FORWARD, **ATTENTION},
    zero_gradient_paths=KEY_BIAS,
    tags=tags("embedding", "masked"),
)
POST_NORM = dataclasses.replace(ENCODER, name="post_norm", build=_post_norm)
LSTM_ATTENTION = dataclasses.replace(
    ENCODER, name="lstm_attention", build=_lstm_attention, layout_map=ATTENTION
)


def valid_tokens(x: np.ndarray) -> np.ndarray:
    """Count of tokens that `Embedding(mask_zero=True)` keeps, per example, shape `(n,)`."""
    return np.asarray(ops.sum(ops.cast(ops.not_equal(x, 0), "int32"), axis=1))
