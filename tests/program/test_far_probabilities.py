"""Probabilities that Keras's cross-entropies would clip: Keras starts from the logits then.

It finds them on the tensor that the activation made. A loss or a metric that sees a tensor put
together from others took the probabilities, clipped, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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


class Judge(layers.Layer):
    """Computes losses of probabilities that it is called with."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


class JudgeOfFirst(Judge):
    """Every row is of the first class."""

    def call(self, y_pred: Any) -> Any:
        return super().call(ops.zeros_like(y_pred[:, 0]), y_pred)[:, None]


class JudgedStep(OwnStep):
    """A layer of its own computes the loss, of what a layer has let through as it was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge, self.drop = Judge(), layers.Dropout(0.0)
        self.judge.built = True

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return ops.mean(self.judge(y, self.drop(y_pred, training=True)))


class GradientOfProbabilities(OwnStep):
    """Trains by what the gradient of its probabilities is, through the layer that takes them."""

    raw: Callable[[Any], Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.after = layers.Dense(3, name="after")
        self.after.build((None, 4))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        weights = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            seen = self.raw(self(x, training=True) / 40)
            tape.watch(seen)
            loss = ops.mean(self.after(seen) ** 2)
        slope = tape.gradient(loss, seen)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"seen": loss, "slope": ops.sum(ops.abs(slope))}


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


def with_early_head(activation: Any, kind: type[keras.Model] = keras.Model) -> keras.Model:
    """Its first head is on the first stage, since a later one reads what it makes."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.Dense(6, name="first")(inputs)
    early = layers.Dense(4, name="early", activation=activation)(hidden)
    hidden = layers.Concatenate(name="both")([hidden, early])
    hidden = layers.Dense(6, name="second")(layers.Dense(8, name="middle")(hidden))
    last = layers.Dense(4, name="up", activation="softmax")(hidden)
    return kind(inputs, [early, layers.Identity(name="same")(early), last])


def judged_late(activation: Any, rate: float | None) -> keras.Model:
    """A layer of a later stage computes a loss of what the first stage makes."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    early = layers.Dense(4, name="early", activation=activation)(inputs)
    hidden = layers.Dense(6, name="hidden")(early)
    between = layers.Identity if rate is None else functools.partial(layers.Dropout, rate)
    losses = JudgeOfFirst(name="judge")(between(name="seen")(early))
    return keras.Model(inputs, layers.Concatenate(name="joined")([hidden, losses]))


def of_images(activation: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.Conv2D(4, 1, name="first")(layers.Reshape((1, 1, 6))(inputs))
    return keras.Model(inputs, layers.Conv2D(4, 1, name="up", activation=activation)(hidden))


Make = Callable[[], keras.Model]


def trained(config: Any, make: Make, y: Any = Y, **compiled: Any) -> dict[str, np.ndarray]:
    model = make()
    if config is not None:
        model = kdist.parallelize(model, config)
    model.compile(keras.optimizers.SGD(1e-3), **compiled)
    x = X[: len(keras.tree.flatten(y)[0])]
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    found = {name: np.array(values) for name, values in history.items()}
    found["evaluated"] = np.array(model.evaluate(x, y, batch_size=4, verbose=0))
    return found | {v.path: v.numpy() for v in model.weights}


COLUMNS = {"up/kernel": (None, "model"), "up/bias": ("model",)}


def config(
    axes: Mapping[str, int], layout: Mapping[str, Any], stages: Any = "auto"
) -> kdist.ParallelConfig:
    pipeline = None
    if "pipe" in axes:
        pipeline = kdist.PipelineConfig(micro_batches=2, stages=stages)
    layout = layout if "model" in axes else {}
    return kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout, pipeline=pipeline)


def same(
    axes: Mapping[str, int],
    make: Make,
    layout: Mapping[str, Any] = COLUMNS,
    stages: Any = "auto",
    **compiled: Any,
) -> float:
    """Trains over a mesh and on one device, and gives the first loss or metric of the latter."""
    expected = trained(None, make, **compiled)
    actual = trained(config(axes, layout, stages), make, **compiled)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
    return float(next(iter(expected.values()))[0])


CLIPPED = 16.2
"""The most that a clipped probability gives."""


def alike(axes: Mapping[str, int], *of: Any, **compiled: Any) -> None:
    assert same(axes, functools.partial(build, *of), **compiled) > CLIPPED


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
    same(axes, functools.partial(build, tf.nn.sigmoid, Doubled), loss=CROSS)


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
def test_arguments_of_layers(axes: Mapping[str, int]) -> None:
    """A step of one's own calls a layer with them: each replica gets its rows, a new tensor."""
    alike(axes, "softmax", JudgedStep, loss=CROSS)


@pytest.mark.parametrize("axes", MESHES[:2], ids=str)
@pytest.mark.parametrize("raw", [tf.nn.softmax, tf.nn.sigmoid])
def test_gradient_of_arguments(axes: Mapping[str, int], raw: Callable[[Any], Any]) -> None:
    """Inside the layer they are made anew of logits; who asks for their gradient gets it."""

    class Taped(GradientOfProbabilities):
        def raw(self, logits: Any) -> Any:
            return raw(logits)

    same(axes, functools.partial(build, None, Taped), loss=CROSS)


@pytest.mark.parametrize("axes", MESHES[:2], ids=str)
def test_op_by_op(axes: Mapping[str, int]) -> None:
    alike(axes, "softmax", Doubled, loss=CROSS, metrics=[CROSS], run_eagerly=True)


@pytest.mark.parametrize("axes", [{"pipe": 2, "data": 2}, {"pipe": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("activation", ["softmax", tf.nn.softmax])
def test_made_by_an_earlier_stage(axes: Mapping[str, int], activation: Any) -> None:
    """What crosses to the next stage is a new tensor there."""
    compiled = {"loss": [CROSS] * 3, "metrics": [[CROSS]] * 3, "y": [Y] * 3}
    assert same(axes, functools.partial(with_early_head, activation), **compiled) > CLIPPED


@pytest.mark.parametrize("activation", ["softmax", tf.nn.softmax])
@pytest.mark.parametrize("rate", [None, 0.0])
def test_seen_by_a_layer_of_a_later_stage(activation: Any, rate: float | None) -> None:
    """Through layers that hand on what they take, dropout where nothing is dropped."""
    make = functools.partial(judged_late, activation, rate)
    same(
        {"pipe": 2},
        make,
        stages={"early": 0, "hidden|seen|judge": 1},
        loss="mse",
        y=np.zeros((8, 7)),
    )


@pytest.mark.parametrize("activation", ["softmax", tf.nn.softmax])
def test_losses_of_outputs(activation: Any) -> None:
    """Keras weighs them by the rows of the batch if it knows their number while it traces."""
    make = functools.partial(with_early_head, activation, Doubled)
    same({"pipe": 2, "model": 2}, make, loss=[CROSS] * 3, y=[Y[:6]] * 3)


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"pipe": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("output", [(None, "model"), ("data", None)], ids=str)
def test_laid_out(axes: Mapping[str, int], output: Any) -> None:
    """A re-layout makes a new tensor."""
    layout = {**COLUMNS, "up/output": output if "data" in axes else (None, None)}
    alike(axes, "softmax", layout=layout, loss=CROSS)


@pytest.mark.parametrize("activation", ["softmax", tf.nn.softmax])
def test_convolution(activation: Any) -> None:
    """Gradients of convolutions are laid out by rows, for which there is a new tensor too."""
    layout = {"first/kernel": (None, None, None, "model")}
    make, y = functools.partial(of_images, activation), Y[:, None, None]
    assert same({"data": 2, "model": 2}, make, layout, loss=CROSS, y=y) > CLIPPED
