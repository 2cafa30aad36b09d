"""On meshes with inner axes, too, a step is one function, and so are several in one execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.graphs import executed
from kdist.graphs.executed import ASSIGNMENTS, PRODUCTS, ExecutedFunction

import keras
import numpy as np
import pytest
import tensorflow as tf

CUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
MESHES = {
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
WITHOUT_INNER_AXES = {"data4": {"data": 4}, "pipe2_data2": {"pipe": 2, "data": 2}}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)), RNG.normal(size=(24, 4))


def build(mesh: str | None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
    if mesh is not None:
        pipeline = kdist.PipelineConfig(micro_batches=2) if "pipe" in mesh else None
        axes = {**MESHES, **WITHOUT_INNER_AXES}[mesh]
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**axes), layout_map=CUTS if "model" in axes else {}, pipeline=pipeline
        )
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def only(functions: list[ExecutedFunction], ops: str) -> ExecutedFunction:
    """The one function that ran operations of a kind."""
    (found,) = (f for f in functions if f.select(ops))
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_training_evaluation_and_prediction_are_one_function_each(mesh: str) -> None:
    model = build(mesh)
    devices = set(model.plan().topology.devices)
    step = only(executed.watch(lambda: model.train_on_batch(X, Y)), PRODUCTS)
    assert {n.device for n in step.select(PRODUCTS)} == devices
    assert {n.device for n in step.select(ASSIGNMENTS)} == devices
    calls: tuple[Callable[[], Any], ...] = (
        lambda: model.evaluate(X, Y, batch_size=24, verbose=0),
        lambda: model.predict(X, batch_size=24, verbose=0),
    )
    for call in calls:
        found = only(executed.watch(call), PRODUCTS)
        assert {n.device for n in found.select(PRODUCTS)} == devices


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", MESHES)
def test_several_steps_are_one_call(mesh: str) -> None:
    plain, model = build(None, steps_per_execution=3), build(mesh, steps_per_execution=3)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, Y, **options).history
    found: list[Any] = []
    functions = executed.watch(lambda: found.append(model.fit(X, Y, **options).history))
    assert len(only(functions, PRODUCTS).select("While|StatelessWhile|Exit")) > 0
    for name, values in expected.items():
        np.testing.assert_allclose(found[0][name], values, rtol=1e-9)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", [*MESHES, *WITHOUT_INNER_AXES])
def test_predictions_on_several_batches_are_one_call(mesh: str) -> None:
    """Of whole executions; at the end of the data there may be fewer batches, or a smaller one."""
    made = ((None, 3), (mesh, 1), (mesh, 3))
    plain, single, model = (build(one, steps_per_execution=k) for one, k in made)
    expected = plain.predict(X[:21], batch_size=4, verbose=0)
    once = only(executed.watch(lambda: single.predict(X[:4], batch_size=4, verbose=0)), PRODUCTS)
    functions = executed.watch(lambda: model.predict(X[:12], batch_size=4, verbose=0))
    several = only(functions, PRODUCTS)
    assert several.count(PRODUCTS) == {d: 3 * n for d, n in once.count(PRODUCTS).items()}
    np.testing.assert_allclose(model.predict(X[:21], batch_size=4, verbose=0), expected, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_the_end_of_the_data_and_a_smaller_batch_are_steps_too() -> None:
    """7 batches of 3 and one of 2 rows, three at a time."""
    plain, model = (build(mesh, steps_per_execution=3) for mesh in (None, "data2_model2"))
    x, y = X[:23], Y[:23]
    for one in (plain, model):
        one.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == 16
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("steps", [1, 2])
def test_sparse_inputs_run_on_gathered_weights_and_say_so(steps: int) -> None:
    def sparse(mesh: bool) -> keras.Model:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,), sparse=True)
        x = keras.layers.Dense(8, name="up")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
        if mesh:
            axes = kdist.mesh(**MESHES["data2_model2"])
            kdist.parallelize(model, kdist.ParallelConfig(mesh=axes, layout_map=CUTS))
        model.compile("sgd", "mse", steps_per_execution=steps)
        return model

    plain, model = sparse(False), sparse(True)
    x = tf.sparse.from_dense(np.where(X > 0.5, X, 0.0))
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    expected = plain.fit(x, Y, **options).history["loss"]
    with pytest.warns(UserWarning, match="sparse inputs.*gathered weights"):
        found = model.fit(x, Y, **options).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_ragged_inputs_are_refused() -> None:
    """That of ids which something besides a `DistributedEmbedding` takes."""
    given = keras.Input((None,), dtype="int32", ragged=True)
    table = kdist.layers.TableConfig("words", 9, 4)
    feature = kdist.layers.FeatureConfig("words", table, (None, 3), (None, 4))
    rows = kdist.layers.DistributedEmbedding(feature)(given + 1)
    model = keras.Model(given, keras.layers.Dense(1)(rows))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(model=2))).compile("sgd", "mse")
    words = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6]], dtype=tf.int32)
    with pytest.raises(ValueError, match="ragged tensors have none, .* Pad others before"):
        model.train_on_batch(words, np.ones((4, 1), "float32"))
