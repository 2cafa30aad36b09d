"""Runs go on with data in every structure that `fit` takes, and are those of plain Keras."""

from __future__ import annotations

import kdist
from kdist.callbacks import ShardedCheckpoint

import keras
import numpy as np
import pytest

ROWS = 20
pytestmark = pytest.mark.usefixtures("float64")


class Copies(keras.Model):
    """Gives back its input, or all of them beside each other; its loss comes from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = keras.layers.Dense(2), keras.layers.Dense(6)

    def call(self, inputs):
        parts = list(inputs.values()) if isinstance(inputs, dict) else inputs
        x = keras.ops.concatenate(list(parts), -1) if isinstance(parts, list | tuple) else parts
        y = self.wide(self.narrow(x))
        self.add_loss(keras.ops.mean((y - x) ** 2))
        return y


def two_inputs() -> keras.Model:
    """Two inputs, two outputs."""
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    x = keras.layers.Concatenate()([a, b])
    outputs = [keras.layers.Dense(2, name="p")(x), keras.layers.Dense(1, name="q")(x)]
    return keras.Model([a, b], outputs)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_weights_of_classes(tmp_path, share):
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    data = {"x": x, "y": np.arange(ROWS) % 3, "class_weight": {0: 0.7, 1: 3.1, 2: 0.1}}

    def make():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])

    loss = "sparse_categorical_crossentropy"
    plain, saved = losses(make, data, tmp_path, loss, batch_size=8, validation_split=share)
    np.testing.assert_allclose(saved, plain, rtol=1e-9)


def losses(make, data, folder, loss, **options):
    """Of plain Keras, and of a run that saves."""
    found = []
    for callbacks in ([], [ShardedCheckpoint(folder, every_steps=1)]):
        keras.utils.set_random_seed(0)
        model = make()
        if callbacks:
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        model.compile("sgd", loss)
        fitted = model.fit(
            **data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks, **options
        )
        found.append([*fitted.history["loss"], *fitted.history.get("val_loss", [])])
    return found


@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["array", "list", "tuple", "dict"])
def test_inputs_without_targets(tmp_path, kind, share):
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    data = {
        "array": x,
        "list": [x[:, :3], x[:, 3:]],
        "tuple": (x[:, :3], x[:, 3:]),
        "dict": {"a": x[:, :3], "b": x[:, 3:]},
    }[kind]
    plain, saved = losses(Copies, {"x": data}, tmp_path, None, batch_size=8, validation_split=share)
    np.testing.assert_allclose(saved, plain, rtol=1e-9)


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_inputs_and_targets(tmp_path, kind):
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    data = {"x": kind([x[:, :3], x[:, 3:]]), "y": kind([x[:, :2], x[:, :1]])}
    plain, saved = losses(two_inputs, data, tmp_path, "mse", batch_size=np.int64(8))
    np.testing.assert_allclose(saved, plain, rtol=1e-9)


def test_one_weight_for_several_targets(tmp_path):
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    data = {"x": [x[:, :3], x[:, 3:]], "y": [x[:, :2], x[:, :1]]}
    data["sample_weight"] = np.linspace(0.5, 2, ROWS)
    plain, saved = losses(two_inputs, data, tmp_path, "mse", batch_size=8)
    np.testing.assert_allclose(saved, plain, rtol=1e-9)
