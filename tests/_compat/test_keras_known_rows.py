"""Every Keras internal of `kdist._compat.keras_known_rows` does what kdist takes it to do."""

from __future__ import annotations

import contextlib

from kdist._compat import keras_known_rows, keras_trainer

import keras
import numpy as np


def test_unweighted_losses():
    def logs(unweighted: bool) -> dict[str, float]:
        x = keras.Input((2,))
        model = keras.Model(x, [x, keras.ops.multiply(2.0, x)])
        model.compile("sgd", ["mse", "mse"])
        kept = keras_known_rows.unweighted_losses(model) if unweighted else contextlib.nullcontext()
        with kept:
            for value, rows in ((1.0, 3), (2.0, 1)):
                ones = value * np.ones((rows, 2))
                model.compute_loss(ones, [0 * ones, 0 * ones], model(ones))
        assert keras_trainer.compiled_loss(model).call.__name__ == "call"
        assert "call" not in vars(keras_trainer.compiled_loss(model))
        return {m.name: float(m.result()) for m in keras_trainer.loss_trackers(model)}

    assert list(logs(False).values()) == [1.75, 7.0]  # 3 rows of 1, one of 4
    assert list(logs(True).values()) == [2.5, 10.0]
    model = keras.Sequential([keras.layers.Dense(1)])
    with keras_known_rows.unweighted_losses(model):
        pass
