"""State that no layer lists: that of random operations without a seed, and other variables."""

from __future__ import annotations

from typing import Any

import kdist
from kdist._compat import keras_seeds

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ..parity import both_meshes, config


class Noisy(layers.Layer):
    """Adds noise without a seed of its own, as many examples do."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs))


class NoisyInTraining(Noisy):
    """So Keras makes the generator when a step is traced, and not while the model is built."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs) if training else inputs


class Remembers(layers.Layer):
    """Writes a variable that Keras does not track."""

    def build(self, shape: Any) -> None:
        self.hidden = {"calls": (lambda v: lambda: v)(keras.Variable(0.0, name="calls"))}

    def call(self, inputs: Any) -> Any:
        calls = self.hidden["calls"]()
        calls.assign(calls + 1.0)
        return inputs


def build(layer: layers.Layer) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, name="up"), layer, layers.Dense(3, name="down")]
    )


def drawn(
    axes: dict[str, int] | None, layer: type[layers.Layer]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Weights after each of two batches, and the generator's state after them."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = build(layer())
    if axes is not None:
        model = kdist.parallelize(model, config(axes))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.zeros((8, 6)), np.zeros((8, 3))
    losses = [model.train_on_batch(x, y) for _ in range(2)]
    state = keras_seeds.unseeded_generator()
    assert state is not None
    return losses, keras.ops.convert_to_numpy(state)


@both_meshes
@pytest.mark.parametrize("layer", [Noisy, NoisyInTraining])
def test_noise_without_a_seed_goes_on(axes: dict[str, int], layer: type[layers.Layer]) -> None:
    _, plain_state = drawn(None, layer)
    losses, state = drawn(axes, layer)
    # `train_on_batch` gives the mean so far: with the same noise twice, twice the same.
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)
    np.testing.assert_array_equal(state, plain_state)


@both_meshes
def test_another_shape_draws_on_after_the_seed_is_set_again(axes: dict[str, int]) -> None:
    """Keras's generator of before is still the one that the model's steps draw from."""
    keras.utils.set_random_seed(1)
    model = kdist.parallelize(build(NoisyInTraining()), config(axes))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.zeros((8, 6)), np.zeros((8, 3))
    losses = [model.train_on_batch(x, y)]
    keras.utils.set_random_seed(1)
    model.reset_metrics()
    losses.append(model.train_on_batch(x[:4], y[:4]))
    assert np.isfinite(losses).all()


@both_meshes
def test_what_would_be_lost_is_refused(axes: dict[str, int]) -> None:
    model = kdist.parallelize(build(Remembers()), config(axes))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="does not list.*calls"):
        model.train_on_batch(np.zeros((8, 6)), np.zeros((8, 3)))


class Counts(layers.Layer):
    """Counts its calls in a variable that is not Keras's, and reads another."""

    def __init__(self, writes: str, **options: Any) -> None:
        super().__init__(**options)
        self.writes = writes
        self.calls = tf.Variable(0.0, trainable=False, name="calls")
        self.factor = tf.Variable(2.0, trainable=False, name="factor")

    def call(self, inputs: Any) -> Any:
        def write() -> Any:
            self.calls.assign_add(1.0)
            return inputs

        if self.writes == "at once":
            write()
        elif self.writes == "in a function":
            tf.function(write)()
        elif self.writes == "in a branch":
            tf.cond(tf.reduce_sum(inputs) > 0, tf.function(write), lambda: inputs)
        return inputs * self.factor


@both_meshes
@pytest.mark.parametrize("how", ["at once", "in a function", "in a branch"])
def test_what_each_replica_would_write_is_refused(axes: dict[str, int], how: str) -> None:
    model = kdist.parallelize(build(Counts(writes=how, name="counts")), config(axes))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"tf\.Variable.*add_weight.*writes one in"):
        model.train_on_batch(np.zeros((8, 6)), np.zeros((8, 3)))


def test_what_is_read_alone_is_not() -> None:
    model = kdist.parallelize(build(Counts(writes="")), config({"data": 4}))
    model.compile("sgd", "mse")
    model.train_on_batch(np.zeros((8, 6)), np.zeros((8, 3)))
