"""Random operations without a seed go on from one generator, whoever draws first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

pytestmark = pytest.mark.usefixtures("float64")

X, Y = np.zeros((8, 5)), np.zeros((8, 3))


class Noise(layers.Layer):
    """Draws in training, and not in inference."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + keras.random.normal(ops.shape(x)) if training else x


class OwnStep(keras.Model):
    """Draws itself before and after a layer does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        noise = keras.random.normal(ops.shape(x))
        made = ops.mean(self(x + noise, training=True) ** 2)
        return {"seen": made + keras.random.uniform(())}


def noisy(
    name: str, axes: Mapping[str, int] | None, kind: type[keras.Model] = keras.Model
) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = Noise(name=f"{name}_noise")(inputs)
    outputs = layers.Dense(3, name=f"{name}_down", kernel_initializer="ones")(hidden)
    model = kind(inputs, outputs, name=name)
    if axes is not None:
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes)))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.evaluate(X, Y, verbose=0)  # what the model's steps share is made, and nothing is drawn
    return model


def two_models(axes: Mapping[str, int] | None) -> list[float]:
    models = [noisy("one", axes), noisy("other", axes)]
    return [model.train_on_batch(X, Y) for model in models * 2]


def after_the_user(axes: Mapping[str, int] | None) -> list[float]:
    model = noisy("one", axes)
    drawn = float(ops.mean(ops.sum(keras.random.normal((8, 5)), axis=1) ** 2))
    return [drawn, *(model.train_on_batch(X, Y) for _ in range(2))]


def after_a_seed(axes: Mapping[str, int] | None) -> list[float]:
    """Which begins all anew; weights of the next model follow from where the draws left off."""
    model = noisy("one", axes)
    keras.utils.set_random_seed(2)
    losses = [model.train_on_batch(X, Y) for _ in range(2)]
    later = layers.Dense(2)
    later.build((None, 3))
    return [*losses, float(ops.sum(later.kernel))]


def in_a_loop(axes: Mapping[str, int] | None) -> list[float]:
    """`kdist.gradients` traces what `fit` has not."""
    model = noisy("one", axes)
    drawn = [float(keras.random.normal(()))]
    if axes is not None:
        return [*drawn, *(float(kdist.gradients(model, X, Y)[0]) for _ in range(2))]
    pairs = [(Y, model(X, training=True)) for _ in range(2)]
    return [*drawn, *(float(model.compute_loss(X, *pair)) for pair in pairs)]


def in_own_step(axes: Mapping[str, int] | None) -> list[float]:
    model = noisy("one", axes, OwnStep)
    losses = [model.train_on_batch(X, Y, return_dict=True)["seen"] for _ in range(2)]
    return [*losses, float(keras.random.uniform(()))]


def after_verify(axes: Mapping[str, int] | None) -> list[float]:
    """Twins draw too, which leaves nothing behind."""
    models = [noisy("one", axes), noisy("other", axes)]
    if axes is not None:
        kdist.verify(models[1], X, Y)
    return [model.train_on_batch(X, Y) for model in models * 2]


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 2}], ids=str)
@pytest.mark.parametrize(
    "draw", [two_models, after_the_user, after_a_seed, in_a_loop, in_own_step, after_verify]
)
def test_numbers_of_one_device(
    axes: Mapping[str, int], draw: Callable[[Mapping[str, int] | None], list[float]]
) -> None:
    found = []
    for where in (None, axes):
        keras.utils.set_random_seed(1)
        found.append(draw(where))
    assert len(set(found[0])) == len(found[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)
