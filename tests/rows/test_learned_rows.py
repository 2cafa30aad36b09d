"""What is learned and repeated for the batch; losses that TensorFlow knows as wholes."""

from __future__ import annotations

from typing import Any

from kdist.rows.model import study_model

import keras
import numpy as np
import pytest
from keras import layers, ops

ROWS = np.zeros((4, 5, 8), "float32")


def queries(how: str) -> keras.Model:
    """What a model has learned attends to its inputs, as in Perceiver and DETR."""

    class Queries(layers.Layer):
        def build(self, shape: Any) -> None:
            self.learned = self.add_weight(shape=(3, 8), name="learned")

        def call(self, x: Any) -> Any:
            count = ops.shape(x)[0]
            if how == "repeat":
                return ops.repeat(self.learned[None], count, axis=0)
            if how == "broadcast":
                return ops.broadcast_to(self.learned, (count, 3, 8))
            return ops.tile(self.learned[None], (count, 1, 1))

    inputs = keras.Input((5, 8))
    x = layers.LayerNormalization()(layers.Dense(8, activation="gelu")(Queries()(inputs)))
    x = x + layers.MultiHeadAttention(2, 4)(x, inputs)
    if how == "across":  # each query meets those of another row
        x = x + ops.roll(x, 1, axis=0)
    return keras.Model(inputs, layers.Dense(2)(x))


@pytest.mark.parametrize("how", ["repeat", "broadcast", "tile"])
def test_learned_queries_keep_rows_apart(how: str) -> None:
    assert study_model(queries(how), ROWS, True, "mean").lines() == []


def test_rows_that_meet_behind_queries_are_told() -> None:
    assert study_model(queries("across"), ROWS, True, "mean").findings


class Spelling(layers.Layer):
    """Adds the CTC loss of its inputs."""

    def __init__(self, meets: bool = False) -> None:
        super().__init__()
        self.meets = meets

    def call(self, scores: Any, labels: Any, lengths: Any) -> Any:
        if self.meets:
            scores = scores - ops.mean(scores, axis=0)
        frames = ops.full_like(lengths, scores.shape[1])
        losses = ops.ctc_loss(labels, scores, lengths, frames, mask_index=6)
        self.add_loss(ops.mean(losses))
        return scores


@pytest.mark.parametrize("meets", [False, True])
def test_the_ctc_loss_of_a_layer_is_one_of_rows(meets: bool) -> None:
    inputs = [
        keras.Input((12, 6)),
        keras.Input((4,), dtype="int32"),
        keras.Input((), dtype="int32"),
    ]
    scores = layers.Dense(7)(inputs[0])
    model = keras.Model(inputs, Spelling(meets)(scores, *inputs[1:]))
    assert bool(study_model(model, inputs, True, "mean").lines()) is meets
