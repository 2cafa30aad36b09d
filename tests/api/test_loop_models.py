"""`kdist.gradients` of models and losses out of the ordinary, still those of a plain tape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import MESHES, assert_close, assert_same_weights, both_meshes, data, mlp
from .loop_parts import compiled, plain_gradients

pytestmark = pytest.mark.usefixtures("float64")


def disconnected() -> keras.Model:
    """`unused` is trainable and the loss does not depend on it."""
    model = mlp()
    extra = keras.layers.Dense(2, name="unused")(model.layers[1].output)
    outputs = {"value": model.outputs[0], "extra": extra}
    return keras.Model(model.inputs, outputs)


@both_meshes
@pytest.mark.filterwarnings("ignore:.*Gradients do not exist.*")
def test_absent_gradients_are_none(axes):
    plain, parallel = compiled(axes, disconnected, loss={"value": "mse"})
    x, y = data(8)
    loss, found = kdist.gradients(parallel, x, {"value": y})
    expected_loss, expected = plain_gradients(plain, tf.constant(x), {"value": tf.constant(y)})
    assert [g is None for g in found] == [g is None for g in expected]
    assert sum(g is None for g in found) == 2
    assert_close(
        [expected_loss, *[g for g in expected if g is not None]],
        [loss, *[g for g in found if g is not None]],
    )
    unused = parallel.get_layer("unused").kernel.numpy()
    plain.optimizer.apply(expected, plain.trainable_variables)
    kdist.apply_gradients(parallel, found)
    np.testing.assert_array_equal(parallel.get_layer("unused").kernel.numpy(), unused)
    assert_close(plain.get_weights(), parallel.get_weights())


def with_statistics() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    x = keras.layers.BatchNormalization(name="norm")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="down")(x))


def test_statistics_move_on_and_weights_do_not():
    parallel = kdist.parallelize(with_statistics(), kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    parallel.compile("sgd", "mse")
    x, y = data(8)
    moving = parallel.get_layer("norm").moving_mean.numpy()
    kernel = parallel.get_layer("down").kernel.numpy()
    kdist.gradients(parallel, x, y)
    expected = moving * 0.99 + 0.01 * x.mean(axis=0)
    assert_close(expected, parallel.get_layer("norm").moving_mean.numpy())
    np.testing.assert_array_equal(parallel.get_layer("down").kernel.numpy(), kernel)


@both_meshes
def test_gradients_of_a_scaled_loss_are_unscaled(axes):
    def optimizer() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)

    plain, parallel = compiled(axes, optimizer=optimizer)
    x, y = data(8)
    loss, found = kdist.gradients(parallel, x, y)
    expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
    assert_close([expected_loss, *expected], [loss, *found])
    kdist.apply_gradients(parallel, found)
    for variable, gradient in zip(plain.trainable_variables, expected):
        variable.assign_sub(0.1 * gradient)
    assert_close(plain.get_weights(), parallel.get_weights())


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        penalty = 0.1 * keras.ops.sum(self.get_layer("up").kernel ** 2)
        return keras.ops.max(keras.ops.abs(y - y_pred)) + keras.ops.mean(y_pred**2) + penalty


@both_meshes
def test_gradients_of_an_overridden_loss(axes):
    def build() -> keras.Model:
        model = mlp()
        return OwnLoss(model.inputs, model.outputs[0])

    plain, parallel = compiled(axes, build, loss=None)
    x, y = data(8)
    loss, found = kdist.gradients(parallel, x, y)
    expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
    assert_close([expected_loss, *expected], [loss, *found])


class Centres(keras.Model):
    """Looks up a table in the loss alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.centres = keras.layers.Embedding(5, 3, name="centres")
        self.centres.build(())

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        centres = self.centres(keras.ops.argmax(y, axis=-1))
        return keras.ops.mean((y_pred - centres) ** 2)


@both_meshes
def test_rows_that_the_loss_looks_up_stay_rows(axes):
    def build() -> keras.Model:
        model = mlp()
        return Centres(model.inputs, model.outputs[0])

    plain, parallel = compiled(axes, build, lambda: keras.optimizers.SGD(0.1), loss=None)
    x, y = data(5)
    loss, found = kdist.gradients(parallel, x, y)
    expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
    assert isinstance(found[-1], tf.IndexedSlices)
    assert found[-1].indices.shape == (5,)
    whole = [tf.convert_to_tensor(g) for g in found]
    assert_close([expected_loss, *expected], [loss, *whole])
    kdist.apply_gradients(parallel, found)
    plain.optimizer.apply(expected, plain.trainable_variables)
    assert_same_weights(plain, parallel)


def test_gradients_of_a_model_that_dtensor_cannot_run():
    """A captured variable of the user's own: falls back with a warning, first call or not."""
    outside = tf.Variable(2.0, dtype="float64")

    def build() -> keras.Model:
        model = mlp()
        outputs = keras.layers.Lambda(lambda t: t * outside)(model.outputs[0])
        return keras.Model(model.inputs, outputs)

    plain, parallel = compiled(MESHES[1], build)
    x, y = data(8)
    with pytest.warns(UserWarning, match="belongs to no layer"):
        loss, found = kdist.gradients(parallel, x, y)
    expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
    assert_close([expected_loss, *expected], [loss, *found])
    plain.optimizer.apply(expected, plain.trainable_variables)
    kdist.apply_gradients(parallel, found)
    assert_same_weights(plain, parallel)


def _of_rows(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - p)) + keras.ops.std(p)


def test_after_a_checkpoint_was_restored_a_loss_over_the_batch_is_one(tmp_path: Path) -> None:
    """Restoring makes the optimizer's state, before a batch has shown what the loss looks at."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 3))

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head")])
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        model.compile("sgd", _of_rows)
        return model

    first = build()
    first.fit(x, y, verbose=0)
    kdist.checkpoint.save(first, tmp_path)
    second = build()
    kdist.checkpoint.restore(second, tmp_path)
    (loss, found), (expected, others) = (kdist.gradients(m, x, y) for m in (second, first))
    np.testing.assert_allclose(loss, _of_rows(y, second.predict(x, verbose=0)), rtol=1e-9)
    for one, other in zip([loss, *found], [expected, *others]):
        np.testing.assert_allclose(one, other, rtol=1e-9)
