"""`kdist.gradients`, `apply_gradients` and `reduce` equal a plain tape, optimizer and call."""

from __future__ import annotations

import warnings
from typing import Any

import kdist
from kdist import spmd_step

import keras
import numpy as np
import pytest
import tensorflow as tf

from .parity import (
    MESHES,
    assert_close,
    assert_every_copy,
    assert_same_weights,
    both_meshes,
    config,
    data,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")


def plain_gradients(model: keras.Model, x: Any, y: Any, weight: Any = None) -> tuple:
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weight, training=True)
    found = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return loss, [None if g is None else tf.convert_to_tensor(g) for g in found]


def compiled(axes: dict, build: Any = mlp, optimizer: Any = None, **options: Any) -> tuple:
    models = pair(axes, build)
    for model in models:
        make = optimizer or (lambda: keras.optimizers.Adam(0.01))
        model.compile(make(), **{"loss": "mse", **options})
    return models


@both_meshes
@pytest.mark.parametrize("rows", [8, 5, 1])
def test_gradients_equal_a_tape(axes, rows):
    plain, parallel = compiled(axes)
    x, y = data(rows)
    before = parallel.get_weights()
    loss, found = kdist.gradients(parallel, x, y)
    expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
    assert_close(expected_loss, loss)
    assert_close(expected, found)
    assert [g.shape for g in found] == [v.shape for v in parallel.trainable_variables]
    assert_close(before, parallel.get_weights())


@both_meshes
def test_gradients_with_sample_weights(axes):
    plain, parallel = compiled(axes)
    x, y = data(6)
    weight = np.linspace(0, 2, 6)
    loss, found = kdist.gradients(parallel, x, y, weight)
    expected_loss, expected = plain_gradients(
        plain, tf.constant(x), tf.constant(y), tf.constant(weight)
    )
    assert_close([expected_loss, *expected], [loss, *found])


@both_meshes
def test_apply_gradients_equals_the_optimizer(axes):
    plain, parallel = compiled(axes)
    x, y = data(8)
    for _ in range(3):
        _, grads = plain_gradients(plain, tf.constant(x), tf.constant(y))
        plain.optimizer.apply(grads, plain.trainable_variables)
        _, found = kdist.gradients(parallel, x, y)
        kdist.apply_gradients(parallel, found)
    assert_same_weights(plain, parallel)
    for variable in parallel.weights:
        assert_every_copy(variable, variable.numpy())


@both_meshes
def test_a_loop_with_clipping_and_accumulation(axes):
    """The example of `kdist.gradients`: clip each gradient, sum two batches, apply."""
    plain, parallel = compiled(axes)
    batches = [data(8, seed=s) for s in range(4)]
    for first, second in zip(batches[::2], batches[1::2]):
        sums: list[Any] = []
        for model, gradients in ((plain, plain_gradients), (parallel, kdist.gradients)):
            found = []
            for x, y in (first, second):
                _, grads = gradients(model, tf.constant(x), tf.constant(y))
                found.append([tf.clip_by_norm(g, 0.1) for g in grads])
            sums.append([a + b for a, b in zip(*found)])
        assert_close(*sums)
        plain.optimizer.apply(sums[0], plain.trainable_variables)
        kdist.apply_gradients(parallel, sums[1])
    assert_same_weights(plain, parallel)


@both_meshes
def test_loop_and_fit_mix(axes):
    plain, parallel = compiled(axes)
    x, y = data(8)
    for model in (plain, parallel):
        model.fit(x, y, verbose=0)
    _, grads = plain_gradients(plain, tf.constant(x), tf.constant(y))
    plain.optimizer.apply(grads, plain.trainable_variables)
    kdist.apply_gradients(parallel, kdist.gradients(parallel, x, y)[1])
    for model in (plain, parallel):
        model.fit(x, y, verbose=0)
    assert_same_weights(plain, parallel)


@both_meshes
@pytest.mark.parametrize("scaled", [False, True])
def test_rows_of_a_table_stay_rows(axes, scaled):
    """A row looked up twice: Adam squares what each look-up gives, as it does in `fit`."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        ids = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(6, 4, name="table")(ids))
        hidden = keras.layers.Dense(8, "tanh", name="up")(hidden)
        return keras.Model(ids, keras.layers.Dense(3, name="down")(hidden))

    def optimizer() -> Any:
        adam = keras.optimizers.Adam(0.01)
        return keras.optimizers.LossScaleOptimizer(adam, initial_scale=64.0) if scaled else adam

    models = (*compiled(axes, build, optimizer), build())
    plain, parallel, fitted = models
    fitted.compile(optimizer(), "mse")
    x, y = np.array([[1, 1, 2, 5], [1, 0, 2, 2]] * 4), data(8)[1]
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = plain.compute_loss(x, y, plain(x, training=True), training=True)
            loss = plain.optimizer.scale_loss(loss)
        grads = tape.gradient(loss, plain.trainable_variables)
        plain.optimizer.apply(grads, plain.trainable_variables)
        _, found = kdist.gradients(parallel, x, y)
        assert [isinstance(g, tf.IndexedSlices) for g in found] == [True] + [False] * 4
        assert_close(grads[0].indices, found[0].indices)
        assert_close(grads[0].values, found[0].values * (64.0 if scaled else 1.0))
        kdist.apply_gradients(parallel, found)
        fitted.train_on_batch(x, y)
    assert_same_weights(plain, parallel, fitted)


def test_a_loop_in_one_function():
    """Two steps in a function, and nothing built before."""
    plain, parallel = compiled(MESHES[0])
    batches = [tf.constant(a) for seed in (0, 1) for a in data(8, seed=seed)]

    def twice(gradients: Any, apply: Any) -> Any:
        def steps(*batches: Any) -> list:
            losses = []
            for x, y in zip(batches[::2], batches[1::2]):
                loss, found = gradients(x, y)
                apply(found)
                losses.append(loss)
            return losses

        return steps

    plain_apply = lambda g: plain.optimizer.apply(g, plain.trainable_variables)  # noqa: E731
    expected = twice(lambda x, y: plain_gradients(plain, x, y), plain_apply)
    function = tf.function(
        twice(
            lambda x, y: kdist.gradients(parallel, x, y),
            lambda g: kdist.apply_gradients(parallel, g),
        ),
        autograph=False,
    )
    for _ in range(2):
        assert_close(expected(*batches), function(*batches))
    assert_same_weights(plain, parallel)


def test_a_function_over_inner_axes_is_refused():
    _, parallel = compiled(MESHES[1])
    x, y = data(8)

    @tf.function(autograph=False)
    def in_graph() -> Any:
        return kdist.gradients(parallel, x, y)[0]

    with pytest.raises(ValueError, match="outside of tf.function.*Received: a call in a graph"):
        in_graph()
    _, found = kdist.gradients(parallel, x, y)
    tf.function(lambda: kdist.apply_gradients(parallel, found), autograph=False)()
    plain = mlp()
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    plain.train_on_batch(x, y)
    assert_same_weights(plain, parallel)


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


# -- reduce ------------------------------------------------------------------------------------


def test_a_loop_compiles_a_bounded_number_of_shapes(monkeypatch):
    """Two sizes get DTensor programs and keep them; all others share one on gathered weights."""
    monkeypatch.setattr(spmd_step, "MAX_SHAPES", 2)
    calls: list[int] = []

    class Noted(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            calls.append(1)
            return inputs

    def build(first: type = keras.layers.Identity) -> keras.Model:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, "tanh", name="up")(first(name="first")(inputs))
        return keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))

    plain, parallel = build(), kdist.parallelize(build(Noted), config(MESHES[1]))
    for model in (plain, parallel):
        model.compile("sgd", "mse")
    traces, messages = [], []
    for rows in (8, 6, 10, 12, 14, 4, 16, 18, 8, 6):
        x, y = data(rows)
        before = len(calls)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss, found = kdist.gradients(parallel, x, y)
        messages.append(sum("shapes of a batch" in str(w.message) for w in caught))
        traces.append(len(calls) - before)
        expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
        assert_close([expected_loss, *expected], [loss, *found])
        kdist.apply_gradients(parallel, found)
        plain.optimizer.apply(expected, plain.trainable_variables)
    assert messages == [0, 0, 1, *[0] * 7]
    assert min(traces[:3]) > 0
    assert sum(traces[4:]) == 0
    assert_same_weights(plain, parallel)


@both_meshes
@pytest.mark.parametrize("rows", [8, 5, 2, 1])
def test_reduce_means_and_sums_over_rows(axes, rows):
    _, parallel = pair(axes)
    a, b = data(rows)[0], data(rows, seed=1)[0]

    def mean(a: Any, b: Any) -> dict:
        return {"error": tf.reduce_mean(tf.abs(a - b)), "per": tf.reduce_mean(a, axis=0)}

    found = kdist.reduce(parallel, mean, a, b)
    assert_close({"error": np.abs(a - b).mean(), "per": a.mean(axis=0)}, found)
    total = kdist.reduce(parallel, lambda t: tf.reduce_sum(t, axis=0), a, op="sum")
    assert_close(a.sum(axis=0), total)


@both_meshes
def test_reduce_takes_structures_and_integers(axes):
    _, parallel = pair(axes)
    labels = np.array([0, 1, 1, 2, 2, 2])

    def count(batch: dict) -> Any:
        return tf.math.bincount(batch["labels"], minlength=3)

    found = kdist.reduce(parallel, count, {"labels": labels}, op="sum")
    assert np.asarray(found).tolist() == [1, 2, 3]


def test_reduce_runs_on_every_replicas_device():
    _, parallel = pair(MESHES[0])
    devices = []
    kdist.reduce(parallel, lambda t: devices.append(tf.identity(t).device) or t[0], np.ones(8))
    assert [d.rsplit(":", 1)[1] for d in devices] == ["0", "1", "2", "3"]


# -- misuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda m: kdist.gradients(m, *data(8)),
        lambda m: kdist.apply_gradients(m, [None] * 4),
        lambda m: kdist.reduce(m, tf.reduce_mean, np.ones(4)),
    ],
    ids=["gradients", "apply", "reduce"],
)
def test_a_plain_model_is_refused(call):
    with pytest.raises(ValueError, match=r"(?s)kdist.parallelize.*Received: model="):
        call(mlp())


def test_apply_before_gradients_is_refused():
    _, parallel = compiled(MESHES[0])
    with pytest.raises(ValueError, match=r"(?s)kdist.gradients.*Received: model="):
        kdist.apply_gradients(parallel, [None] * 4)


def test_another_number_of_gradients_is_refused():
    _, parallel = compiled(MESHES[0])
    kdist.gradients(parallel, *data(8))
    with pytest.raises(ValueError, match=r"(?s)4 of them.*Received: 3 gradients"):
        kdist.apply_gradients(parallel, [None] * 3)


def test_another_op_is_refused():
    _, parallel = pair(MESHES[0])
    with pytest.raises(ValueError, match=r"Received: op='max'"):
        kdist.reduce(parallel, tf.reduce_max, np.ones(4), op="max")


def test_gradients_before_compile_is_refused():
    _, parallel = pair(MESHES[0])
    with pytest.raises(ValueError, match=r"(?s)compile"):
        kdist.gradients(parallel, *data(8))


def test_gradients_without_an_optimizer_is_refused():
    _, parallel = pair(MESHES[0])
    parallel.compile(optimizer=None, loss="mse")
    with pytest.raises(ValueError, match=r"(?s)optimizer.*Received"):
        kdist.gradients(parallel, *data(8))
