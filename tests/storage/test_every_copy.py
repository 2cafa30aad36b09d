"""A plain model that trains weights of a parallel one writes to every copy, or is refused."""

from __future__ import annotations

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, assert_every_copy, compile_all, config, data, mlp, pair

pytestmark = pytest.mark.usefixtures("float64")


def inner() -> keras.Model:
    """A model that others contain."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Embedding(9, 4, name="table"), keras.layers.Flatten()]
    return keras.Sequential(
        [keras.Input((3,)), *layers, keras.layers.Dense(4, name="head")], name="inner"
    )


def run(parallel: bool, optimizer: str) -> list:
    """Losses, outputs and weights of a plain model around another, and of that one afterwards."""
    model = inner()
    if parallel:
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    model.compile(keras.optimizers.get(optimizer), "mse")
    x = np.random.default_rng(0).integers(0, 9, (12, 3))
    y = np.random.default_rng(1).normal(size=(12, 4))
    keras.utils.set_random_seed(6)
    inputs = keras.Input((3,))
    around = keras.Model(inputs, keras.layers.Dense(4)(model(inputs)))
    around.compile(keras.optimizers.get(optimizer), "mse")
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": 2}
    found = around.fit(x, y, **options).history["loss"]
    for variable in model.weights if parallel else ():
        assert_every_copy(variable, variable.numpy())
    found += model.fit(x, y, **options).history["loss"]
    found += around.fit(x, y, **options).history["loss"]
    return [found, model.predict(x, verbose=0), *around.get_weights()]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_plain_model_around_a_parallel_one_trains_all_copies(optimizer):
    """In turns with it; gradients of tables are rows, which `SGD` writes alone."""
    assert_close(run(False, optimizer), run(True, optimizer))


def test_where_weights_are_cut_the_fix_is_named():
    model = pair({"data": 2, "model": 2})[1]
    x, y = data(8)
    features = keras.Model(model.inputs, model.outputs)
    features.compile("sgd", "mse")
    with pytest.raises(AttributeError, match=r"callback.*kdist\.parallelize too.*weight '"):
        features.fit(x, y, verbose=0)


def own_loop(axes: dict[str, int] | None, in_graph: bool) -> list:
    """A user's loop with an optimizer of their own, as on keras.io; then `fit`, and the loop."""
    model = inner()
    if axes is not None:
        pipeline = kdist.PipelineConfig(micro_batches=1) if "pipe" in axes else None
        optimizer = kdist.OptimizerConfig(level=1, threshold_kb=0)
        kdist.parallelize(
            model,
            kdist.ParallelConfig(mesh=kdist.mesh(**axes), pipeline=pipeline, optimizer=optimizer),
        )
    model.compile("sgd", "mse")
    adam = keras.optimizers.Adam(0.05)
    adam.build(model.trainable_variables)
    x = np.random.default_rng(0).integers(0, 9, (12, 3))
    y = np.random.default_rng(1).normal(size=(12, 4))

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        adam.apply(gradients, model.trainable_variables)
        return loss

    train = tf.function(step) if in_graph else step
    found = [float(train()) for _ in range(2)]
    found += model.fit(x, y, batch_size=4, shuffle=False, verbose=0, epochs=2).history["loss"]
    found += [float(train()), model.evaluate(x, y, verbose=0, batch_size=12)]
    return [found, model.predict(x, verbose=0), *model.get_weights()]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_a_loop_with_an_own_optimizer_trains_all_copies(axes, in_graph):
    assert_close(own_loop(None, in_graph), own_loop(axes, in_graph))


def test_such_a_loop_over_inner_axes_is_refused():
    model = pair({"data": 2, "model": 2})[1]
    x, _ = data(8)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
        with pytest.raises(AttributeError, match=r"Call kdist\.gradients.*Received: weight 'up"):
            tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("traced", ["before parallelize", "before compile"])
@pytest.mark.parametrize(("axes", "level"), [({"data": 4}, 3), ({"data": 2, "model": 2}, 0)])
def test_what_was_traced_before_weights_moved_goes_on_with_new_ones(
    axes: dict[str, int], level: int, traced: str
) -> None:
    """Models around the same layers, and one inside, need not be compiled again."""
    (plain, whole), (x, y) = (mlp(), mlp()), data(8)
    features = keras.Model(whole.input, whole.get_layer("up").output)
    inside = keras.Sequential([keras.Input((6,)), whole])
    models, before = (features, whole), traced == "before parallelize"
    if before:
        expected = [one.predict(x, verbose=0) for one in models]
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    kdist.parallelize(inside, config(axes, optimizer=optimizer))
    if not before:
        expected = [one.predict(x, verbose=0) for one in models]
    assert_close(expected[1], plain.predict(x, verbose=0))
    compile_all([inside])
    inside.fit(x, y, verbose=0)
    for one, of_before in zip(models, expected, strict=True):
        now = one.predict(x, verbose=0)
        assert_close(now, one(x))
        assert abs(now - of_before).max() > 1e-4
