"""Loops of `kdist.gradients` and `apply_gradients` equal a plain tape and optimizer."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from typing import Any

import kdist
from kdist.api import custom_loop
from kdist.api.attached import attached
from kdist.graphs import executed

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import (
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
from .loop_parts import compiled, plain_gradients

pytestmark = pytest.mark.usefixtures("float64")


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


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_loop_in_one_function(axes):
    """Two steps in a function, and nothing built before."""
    plain, parallel = compiled(axes)
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


def test_batches_of_unknown_size_stay_cut():
    plain, parallel = compiled(MESHES[1])
    x, y = data(6)

    @tf.function(input_signature=[tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y)])
    def gradients(x: Any, y: Any) -> Any:
        return kdist.gradients(parallel, x, y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, found = gradients(x, y)
    expected, wanted = plain_gradients(plain, x, y)
    assert_close(expected, loss)
    for a, b in zip(wanted, found, strict=True):
        assert_close(a, b)


def test_autograph_leaves_the_library_alone(monkeypatch):
    """Rewriting all that a step runs took 20 s, and warned of what AutoGraph cannot read."""
    plain, parallel = compiled(MESHES[0])
    x, y = data(6)
    files: set[str] = set()

    def noted(model: keras.Model) -> Any:
        files.add(sys._getframe(1).f_code.co_filename)
        return attached(model)

    monkeypatch.setattr(custom_loop, "attached", noted)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        loss, found = kdist.gradients(parallel, x, y)
        kdist.apply_gradients(parallel, found)
        return loss

    assert_close(plain.train_on_batch(x, y), step(x, y))
    assert files == {custom_loop.__file__}


def test_a_loop_compiles_a_bounded_number_of_shapes():
    """Two sizes get programs of their own; all others share one."""
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
    traces = []
    for rows in (8, 6, 10, 12, 14, 4, 15, 18, 8, 6):
        x, y = data(rows)
        before = len(calls)
        loss, found = kdist.gradients(parallel, x, y)
        traces.append(len(calls) - before)
        expected_loss, expected = plain_gradients(plain, tf.constant(x), tf.constant(y))
        assert_close([expected_loss, *expected], [loss, *found])
        kdist.apply_gradients(parallel, found)
        plain.optimizer.apply(expected, plain.trainable_variables)
    assert min(traces[:3]) > 0
    assert sum(traces[3:]) == 0
    assert kdist.inspect(parallel).fallbacks == ()
    assert_same_weights(plain, parallel)


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


def test_gradients_before_compile_is_refused():
    _, parallel = pair(MESHES[0])
    with pytest.raises(ValueError, match=r"(?s)compile"):
        kdist.gradients(parallel, *data(8))


def test_gradients_without_an_optimizer_is_refused():
    _, parallel = pair(MESHES[0])
    parallel.compile(optimizer=None, loss="mse")
    with pytest.raises(ValueError, match=r"(?s)optimizer.*Received"):
        kdist.gradients(parallel, *data(8))


def deep() -> keras.Model:
    """Enough layers for a backward half to have a gradient to wait for."""
    x = inputs = keras.Input((6,))
    for _ in range(4):
        x = keras.layers.Dense(6, "tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def sums_by_device(step: Any) -> dict[str, int]:
    """Sums over the replicas that the largest function ran, per device."""
    nodes = executed.largest(executed.watch(step)).select("AddN")
    return dict(Counter(n.device for n in nodes if re.search(r"reduce(_\d+)?$", n.name)))


@pytest.mark.parametrize("level", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 1)), 3])
def test_gradients_travel_as_in_fit(level):
    """In the same buckets, to the same owners; from level 2 on the backward pass waits for them."""
    options = {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0)}
    x, y = data(8)
    found = []
    for own in (False, True):
        _, model = pair({"data": 2}, deep, **options)
        model.compile("sgd", "mse")

        @tf.function(autograph=False)
        def step(x, y, model=model):
            return kdist.gradients(model, x, y)

        if own:
            with tf.init_scope():
                attached(model).step_for((x, y, None))
            found.append(sums_by_device(lambda: step(tf.constant(x), tf.constant(y))))  # noqa: B023
        else:
            found.append(sums_by_device(lambda: model.train_on_batch(x, y)))  # noqa: B023
    assert found[0] == found[1] and sum(found[0].values()) > 0
    operations = step.get_concrete_function(tf.constant(x), tf.constant(y)).graph.get_operations()
    waits = [op for op in operations for c in op.control_inputs if "reduce" in c.name]
    assert bool([op for op in waits if "Call" in op.type]) == (level >= 2)
