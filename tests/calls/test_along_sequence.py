"""Models of one's own, and steps of one's own, with tensors that are cut along the sequence."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ..parity import assert_close

LENGTHS = (8, 5, 4, 6, 7, 10, 12, 9, 14, 16)
CUTS: Any = {
    ".*emb/embeddings": ("model", None),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}

pytestmark = pytest.mark.usefixtures("float64")


class Block(layers.Layer):
    """Attention and a feed-forward layer, which hand masks on."""

    def __init__(self) -> None:
        super().__init__(name="block")
        self.supports_masking = True
        self.first, self.second = (layers.LayerNormalization(name=n) for n in ("first", "second"))
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")
        self.up = layers.Dense(16, "gelu", name="up")
        self.down = layers.Dense(8, name="down")

    def call(self, x: Any, training: bool = False) -> Any:
        h = self.first(x)
        x = x + self.attention(h, h, use_causal_mask=True, training=training)
        return x + self.down(self.up(self.second(x)))


class Language(keras.Model):
    """A subclassed model of one block; zeros are padding."""

    def __init__(self) -> None:
        super().__init__(name="language")
        self.emb = layers.Embedding(16, 8, mask_zero=True, name="emb")
        self.block = Block()
        self.head = layers.Dense(16, name="head")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.block(self.emb(x), training=training))


class Own(Language):
    """Takes its step itself."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(of_tokens(y, self(x, training=True)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"mean": loss}


def of_tokens(expected: Any, logits: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(expected, logits, from_logits=True)


def language(kind: type[Language], cut: bool, level: int = 0) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = kind()
    model(np.zeros((2, 8), "int32"))
    if cut:
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(data=2, model=2),
            layout_map=CUTS,
            optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
            sequence_parallel=True,
        )
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), None if kind is Own else of_tokens)
    return model


def tokens(rows: int = 8, length: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, some of which end in padding, and the token after each."""
    drawn = np.random.default_rng(length).integers(1, 16, (rows, length + 1))
    drawn[::3, -3:] = 0
    return drawn[:, :-1], drawn[:, 1:]


def fitted(kind: type[Language], cut: bool, level: int = 0) -> list[Any]:
    """Losses, weights and predictions; the last batch is small and odd."""
    model, (x, y) = language(kind, cut, level), tokens(11)
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return [*history.values(), *model.get_weights(), model.predict(x, verbose=0)]


def of_lengths(cut: bool) -> list[Any]:
    """Steps of more lengths than are compiled each by itself; some do not divide."""
    model = language(Language, cut)
    losses = [model.train_on_batch(*tokens(length=length)) for length in LENGTHS]
    return [losses, *model.get_weights()]


def in_a_loop(cut: bool) -> list[Any]:
    model = language(Language, cut)
    losses = []
    if not cut:
        model.optimizer.build(model.trainable_variables)
    for rows in (8, 8, 3):
        x, y = tokens(rows)
        if cut:
            loss, found = kdist.gradients(model, x, y)
            kdist.apply_gradients(model, found)
        else:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            found = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(found, model.trainable_variables)
        losses.append(float(loss))
    return [losses, *model.get_weights()]


def in_a_function(cut: bool) -> list[Any]:
    model = language(Language, cut)
    optimizer = keras.optimizers.Adam(0.01)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(of_tokens(y, model(x, training=True)))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    run = kdist.function(model)(step) if cut else tf.function(step)
    losses = [float(run(*map(tf.constant, tokens(rows)))) for rows in (8, 6, 3)]
    return [losses, *model.get_weights()]


WAYS: dict[str, Any] = {
    "own step": lambda cut: fitted(Own, cut),
    "fit": lambda cut: fitted(Language, cut),
    "fit, level 3": lambda cut: fitted(Language, cut, level=3),
    "own step, level 2": lambda cut: fitted(Own, cut, level=2),
    "kdist.gradients": in_a_loop,
    "kdist.function": in_a_function,
}


@pytest.mark.parametrize("way", WAYS)
def test_equals_one_device(way: str) -> None:
    assert_close(*(WAYS[way](cut) for cut in (False, True)))


@pytest.mark.filterwarnings("ignore:the cut of dim 1")
def test_many_lengths() -> None:
    assert_close(of_lengths(cut=False), of_lengths(cut=True))
