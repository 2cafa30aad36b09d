"""The compiled optimizer, called as Keras's users call it: by its own `apply` after `fit`."""

from __future__ import annotations

import copy

import kdist

import keras
import pytest
import tensorflow as tf

from ..parity import (
    MESHES,
    assert_every_copy,
    assert_same_weights,
    compile_all,
    data,
    pair,
)
from .loop_parts import compiled

pytestmark = pytest.mark.usefixtures("float64")

LEVELS = [{}, {"optimizer": kdist.OptimizerConfig(level=1, threshold_kb=0)}]
FIT = {"batch_size": 8, "epochs": 1, "verbose": 0, "shuffle": False}


def by_tape(model: keras.Model, x, y) -> None:
    """A step of a loop that knows nothing of kdist."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


@pytest.mark.parametrize("options", LEVELS, ids=["level0", "level1"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_loop_after_fit(options, graph):
    models = pair({"data": 4}, **options)
    compile_all(models)
    x, y = data(16)
    for model in models:
        model.fit(x, y, **FIT)
        step = tf.function(by_tape) if graph else by_tape
        step(model, tf.constant(x[:8]), tf.constant(y[:8]))
        by_tape(model, x[8:], y[8:])
        model.fit(x, y, **FIT)
    assert_same_weights(*models)
    for variable in models[1].weights:
        assert_every_copy(variable, variable.numpy())


@pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
def test_gradients_of_the_mesh(axes):
    plain, parallel = compiled(axes)
    x, y = data(8)
    plain.fit(x, y, **FIT)
    parallel.fit(x, y, **FIT)
    by_tape(plain, x, y)
    parallel.optimizer.apply(kdist.gradients(parallel, x, y)[1])
    assert_same_weights(plain, parallel)


def test_what_is_refused():
    _, parallel = compiled({"data": 4}, optimizer=lambda: keras.optimizers.SGD(0.1))
    x, y = data(8)
    parallel.fit(x, y, **FIT)
    found = [tf.zeros(v.shape, v.dtype) for v in parallel.trainable_variables]
    others = [keras.Variable(v) for v in parallel.trainable_variables]
    old = parallel.optimizer
    with pytest.raises(ValueError, match=r"(?s)kdist.apply_gradients.*Received: 'variable"):
        old.apply(found, others)
    twice = [*parallel.trainable_variables, parallel.trainable_variables[0]]
    with pytest.raises(ValueError, match=r"(?s)each weight once.*Received: '.*' twice in apply"):
        old.apply([*found, found[0]], twice)
    with pytest.raises(ValueError, match=r"(?s)4 of them.*Received: 3 gradients"):
        old.apply(found[:3])
    parallel.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    parallel.fit(x, y, **FIT)
    with pytest.raises(ValueError, match=r"(?s)compile.*Received: SGD"):
        old.apply(found)
    with pytest.raises(ValueError, match=r"(?s)loss.*kdist.gradients.*Received: .*LossScale"):
        parallel.optimizer.apply(found)


def test_copies_and_files_are_ordinary_optimizers(tmp_path):
    _, parallel = compiled({"data": 4})
    x, y = data(8)
    parallel.fit(x, y, **FIT)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    by_tape(loaded, x, y)
    by_tape(parallel, x, y)
    assert_same_weights(loaded, parallel)
    fresh = type(parallel.optimizer).from_config(copy.deepcopy(parallel.optimizer.get_config()))
    variable = keras.Variable([1.0, 2.0])
    fresh.apply([tf.ones(2, variable.dtype)], [variable])
    assert (variable.numpy() < [1.0, 2.0]).all()
