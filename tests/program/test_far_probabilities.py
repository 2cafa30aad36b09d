"""Probabilities that Keras's cross-entropies would clip: Keras starts from the logits then.

It finds them on the tensor that the activation made. A loss or a metric that sees a tensor put
together from others took the probabilities, clipped, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

pytestmark = pytest.mark.usefixtures("float64")

X = 40 * np.random.default_rng(0).normal(size=(8, 6))
Y = np.random.default_rng(1).integers(0, 4, 8)


class Doubled(keras.Model):
    """Has a loss over the whole batch."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class OwnStep(keras.Model):
    """Has a step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"seen": loss}


def coupled(y_true: Any, y_pred: Any) -> Any:
    """Cares more for what is far off, as all rows of the batch go."""
    losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
    return ops.sum(losses**2) / ops.sum(losses)


def build(activation: Any, kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.Dense(6, name="first")(inputs)
    outputs = layers.Dense(4, name="up", activation=activation)(hidden)
    return kind(inputs, outputs)


def trained(config: Any, of: Sequence[Any], **compiled: Any) -> dict[str, np.ndarray]:
    model = build(*of)
    if config is not None:
        model = kdist.parallelize(model, config)
    model.compile(keras.optimizers.SGD(1e-3), **compiled)
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    found = {name: np.array(values) for name, values in history.items()}
    found["evaluated"] = np.array(model.evaluate(X, Y, batch_size=4, verbose=0))
    return found | {v.path: v.numpy() for v in model.weights}


def config(axes: Mapping[str, int]) -> kdist.ParallelConfig:
    layout = {"up/kernel": (None, "model"), "up/bias": ("model",)} if "model" in axes else {}
    pipeline = kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None
    return kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout, pipeline=pipeline)


def alike(axes: Mapping[str, int], *of: Any, **compiled: Any) -> None:
    expected = trained(None, of, **compiled)
    assert (
        expected[next(iter(expected))][0] > 20
    )  # what a clipped probability gives is 16.2 at most
    actual = trained(config(axes), of, **compiled)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


CROSS = "sparse_categorical_crossentropy"
MESHES = [{"data": 4}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2}]
meshes = pytest.mark.parametrize("axes", MESHES, ids=str)


@meshes
@pytest.mark.parametrize("activation", ["softmax", ops.softmax])
def test_loss(axes: Mapping[str, int], activation: Any) -> None:
    alike(axes, activation, loss=CROSS)


@meshes
def test_raw_operations(axes: Mapping[str, int]) -> None:
    """A loss looks for its own operation: it clips what a raw sigmoid of TensorFlow gives."""
    alike(axes, tf.nn.softmax, Doubled, loss=CROSS)
    expected = trained(None, (tf.nn.sigmoid, Doubled), loss=CROSS)
    actual = trained(config(axes), (tf.nn.sigmoid, Doubled), loss=CROSS)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@meshes
def test_loss_in_which_rows_meet(axes: Mapping[str, int]) -> None:
    alike(axes, "softmax", loss=coupled)


@meshes
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_own_compute_loss(axes: Mapping[str, int], activation: str) -> None:
    alike(axes, activation, Doubled, loss=CROSS)


@meshes
def test_metrics(axes: Mapping[str, int]) -> None:
    """One adds up over rows; the other is computed over all of them."""
    alike(axes, "softmax", loss=CROSS, metrics=[CROSS, coupled])


@pytest.mark.parametrize("axes", MESHES[:2], ids=str)
def test_own_step(axes: Mapping[str, int]) -> None:
    alike(axes, "softmax", OwnStep, loss=CROSS)


@pytest.mark.parametrize("axes", MESHES[:2], ids=str)
def test_op_by_op(axes: Mapping[str, int]) -> None:
    alike(axes, "softmax", Doubled, loss=CROSS, metrics=[CROSS], run_eagerly=True)
