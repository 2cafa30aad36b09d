"""A model that looks up as many words as each row has."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

TEXTS = np.array([["a b c c"], ["c"], ["b x"], ["a a c"]])
RAGGED_IDS = np.array([[1, 2, 3, 3], [3, 0, 0, 0], [2, 5, 0, 0], [1, 1, 3, 0]])


class RaggedWords(keras.Model):
    """Takes the mean of the words that each row has."""

    def __init__(self, texts: bool) -> None:
        super().__init__(name="ragged")
        self.texts = None
        if texts:
            self.texts = layers.TextVectorization(vocabulary=["a", "b", "c"], ragged=True)
        self.table = layers.Embedding(6, 8, name="table")
        self.head = layers.Dense(2, name="head")

    def call(self, x: Any) -> Any:
        ids = tf.RaggedTensor.from_tensor(x, padding=0) if self.texts is None else self.texts(x)
        rows = tf.cast(tf.reduce_mean(self.table(ids), axis=1), "float64")
        return self.head(tf.ensure_shape(rows, [x.shape[0], 8]))
