"""A model whose large weights replicas share otherwise than by rows."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from .case import CLASSES, Case, Data, labels, tags, weights


def _odd() -> keras.Model:
    """What replicas share of its large weights are not rows: their first dims do not divide."""
    ids = keras.Input((7,), dtype="int32", name="ids")
    image = keras.Input((5, 5, 3), name="image")
    x = layers.Embedding(13, 8, name="table")(ids)
    x = layers.Dense(5, activation="tanh", name="narrow")(x)
    x = layers.GlobalAveragePooling1D(name="mean")(layers.Dense(8, name="wide")(x))
    y = layers.Conv2D(8, 3, padding="same", activation="tanh", name="up")(image)
    y = layers.GlobalAveragePooling2D(name="places")(layers.Conv2D(8, 3, name="down")(y))
    outputs = layers.Dense(CLASSES, name="head")(layers.Add(name="both")([x, y]))
    return keras.Model({"ids": ids, "image": image}, outputs, name="odd")


def _odd_data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = {"ids": rng.integers(0, 13, (samples, 7)).astype("int32")}
    x["image"] = rng.normal(size=(samples, 5, 5, 3))
    return x, labels(rng, samples), weights(rng, samples)


ODD = Case(
    name="odd",
    build=_odd,
    data=_odd_data,
    layout_map={
        "table/embeddings": (None, "model"),
        "wide/kernel": (None, "model"),
        "up/kernel": (None, None, None, "model"),
        "up/bias": ("model",),
        "down/kernel": (None, None, "model", None),
    },
    tags=tags("labels", "dict", "embedding", "dense"),
)
