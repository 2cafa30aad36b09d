"""Models with tables on the host: looked up twice, with duplicates, by indices the model makes."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np

from .case import CLASSES, FEED_FORWARD, Case, labels

ROWS = 48
"""Of the table that two features share; a batch looks up fewer."""


class Wide(keras.layers.Layer):
    """Looks up pairs of tokens by indices that it computes, and places, the same in each batch."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.table = keras.layers.Embedding(30, 3, name="pairs")
        self.places = keras.layers.Embedding(20, 3, name="places")

    def call(self, tokens: Any) -> Any:
        pairs = keras.ops.reshape(tokens, (-1, 3, 2))
        found = self.table(keras.ops.sum(pairs, -1) % 30)
        return keras.ops.mean(found * self.places(keras.ops.arange(3)), axis=1)


def _build() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    table = keras.layers.Embedding(ROWS, 8, mask_zero=True, name="vocabulary")
    # A short batch has a stand-in row: averages over no valid position are no numbers.
    deep = keras.layers.GlobalAveragePooling1D(name="pool")(table(tokens))
    both = [deep, keras.layers.Flatten()(table(tags)), Wide("wide")(tokens)]
    x = keras.layers.Concatenate()(both)
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(x), name="tables")


class Subclassed(keras.Model):
    """The same, with a call of its own."""

    def __init__(self) -> None:
        super().__init__(name="tables")
        self.inner = _build()

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def _subclassed() -> keras.Model:
    model = Subclassed()
    model([np.zeros((2, 6), "int32"), np.zeros((2, 2), "int32")])
    return model


def _frozen() -> keras.Model:
    """Of three tables one does not train, and is looked up for two features."""
    model = _build()
    model.get_layer("vocabulary").trainable = False
    return model


class Shifted(keras.layers.Embedding):
    """A `call` of its own: two look-ups, and a weight beside the table."""

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        self.scale = self.add_weight(shape=(self.output_dim,), initializer="uniform", name="scale")

    def call(self, ids: Any) -> Any:
        after = super().call((ids + 1) % self.input_dim)
        return super().call(ids) * self.scale + after


def _own_calls() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    x = Shifted(ROWS, 8, mask_zero=True, name="vocabulary")(tokens)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model(tokens, keras.layers.Dense(CLASSES, name="head")(x), name="own_calls")


def _penalized() -> keras.Model:
    """Of three tables one has a penalty over all of its rows, and so has a kernel."""
    model = _build()
    for layer, names in (("vocabulary", "embeddings"), ("up", "kernel")):
        penalty = keras.regularizers.L1L2(l1=1e-3, l2=0.05)
        setattr(model.get_layer(layer), f"{names}_regularizer", penalty)
        getattr(model.get_layer(layer), names).regularizer = penalty
    return model


def _masked_by_rows() -> keras.Model:
    """The loss counts tokens whose row is not zero."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    table = keras.layers.Embedding(ROWS, 8, name="vocabulary")
    x = keras.layers.Masking(name="present")(table(tokens))
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    values = table.embeddings.numpy()
    values[1:12:3] = 0
    table.embeddings.assign(values)
    return keras.Model(tokens, keras.layers.Dense(CLASSES, name="head")(x), name="masked_by_rows")


def _labelled_tokens(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    tokens = labels(rng, samples, 6, classes=12)
    tokens[:, 0] = 3  # a position that counts in every example
    return tokens, labels(rng, samples, 6), None


def _twice() -> keras.Model:
    """The second stage looks up, in the same table, what the first does not."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    table = keras.layers.Embedding(ROWS, 8, mask_zero=True, name="vocabulary")
    x = keras.layers.GlobalAveragePooling1D(name="pool")(table(tokens))
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    both = keras.layers.Concatenate(name="both")([x, keras.layers.Flatten()(table(tags))])
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(both), name="twice")


def _in_chunks() -> keras.Model:
    """Four virtual stages, three of which look up in one table; from one feature none learns."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    table = keras.layers.Embedding(ROWS, 8, name="vocabulary")
    x = keras.layers.Dense(16, "gelu", name="up")(keras.layers.Flatten()(table(tokens)))
    x = keras.layers.Dense(8, name="down")(x)
    known = keras.ops.stop_gradient(keras.layers.Flatten()(table((tags + 1) % ROWS)))
    x = keras.layers.Concatenate(name="both")([x, known])
    x = keras.layers.Dense(8, "gelu", name="join")(x)
    x = keras.layers.Concatenate(name="all")([x, keras.layers.Flatten()(table(tags))])
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(x), name="chunks")


def _frozen_in_chunks() -> keras.Model:
    model = _in_chunks()
    model.get_layer("vocabulary").trainable = False
    return model


CHUNKS = {"up": 0, "down": 1, "both": 2, "join": 2, "all": 3, "head": 3}
"""Virtual stages of the layers of `_in_chunks`."""


def _tokens(seed: int, samples: int) -> Any:
    (tokens, _), y, weights = _data(seed, samples)
    return tokens, y, weights


def _data(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    tokens = labels(rng, samples, 6, classes=12)
    tokens[:, 0] += 1  # a position that counts in every example
    return [tokens, labels(rng, samples, 2, classes=ROWS)], labels(rng, samples), None


TABLES = Case(name="tables", build=_build, data=_data, layout_map=FEED_FORWARD)
FROZEN = Case(name="frozen", build=_frozen, data=_data, layout_map=FEED_FORWARD)
PENALIZED = Case(name="penalized", build=_penalized, data=_data, layout_map=FEED_FORWARD)
MASKED_BY_ROWS = Case(
    name="masked_by_rows", build=_masked_by_rows, data=_labelled_tokens, layout_map=FEED_FORWARD
)
TWICE = Case(name="twice", build=_twice, data=_data, layout_map=FEED_FORWARD)
IN_CHUNKS = Case(name="chunks", build=_in_chunks, data=_data, layout_map=FEED_FORWARD)
FROZEN_IN_CHUNKS = Case(
    name="frozen_chunks", build=_frozen_in_chunks, data=_data, layout_map=FEED_FORWARD
)
OWN_CALLS = Case(name="own_calls", build=_own_calls, data=_tokens, layout_map=FEED_FORWARD)
SUBCLASSED = Case(name="subclassed", build=_subclassed, data=_data, layout_map=FEED_FORWARD)


def on_host(model: keras.Model) -> None:
    """Places every table of a model."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding):
            kdist.place(layer, "host")
