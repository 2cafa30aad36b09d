"""What a batch may hold: tensors of as many rows, weights now and then, and absent members."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.usefixtures("float64")

MESHES: dict[str, dict[str, int]] = {
    "data2": {"data": 2},
    "data2_model2": {"data": 2, "model": 2},
}
rng = np.random.default_rng(0)
X, Y, W = rng.normal(size=(22, 6)), rng.normal(size=(22, 2)), rng.uniform(0.1, 3, size=22)
T, Y2 = rng.normal(size=(22, 3, 6)), rng.normal(size=(22, 2))


def on(model: keras.Model, mesh: str | None, *, level: int = 0, stages: bool = False) -> Any:
    if mesh is None:
        return model
    axes = {"pipe": 2, **MESHES[mesh]} if stages else MESHES[mesh]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map={".*a/kernel": (None, "model")} if "model" in axes else {},
        optimizer=kdist.OptimizerConfig(level=level),
        pipeline=kdist.PipelineConfig(micro_batches=2) if stages else None,
    )
    return kdist.parallelize(model, config)


def dense() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh", name="a"), keras.layers.Dense(2, name="b")]
    return keras.Sequential([keras.Input((6,)), *layers])


def same(build: Callable, run: Callable, mesh: str, **options: Any) -> None:
    plain, model = build(), on(build(), mesh, **options)
    np.testing.assert_allclose(run(model), run(plain), rtol=1e-9)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def trained_now_and_then_with_weights(model: keras.Model) -> list[float]:
    """Batches with weights and without, of sizes that were seen before and are new."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.SGD(0.1), loss)
    sizes = [(7, True), (7, False), (5, True), (9, True), (9, False), (7, True)]
    return [float(model.train_on_batch(X[:n], Y[:n], *[W[:n]] * w)) for n, w in sizes]


def evaluated_now_and_then_with_weights(model: keras.Model) -> list[float]:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.SGD(0.1), loss)
    found = []
    for rows, weighted in ((7, True), (7, False), (13, True), (21, True), (13, False)):
        given = W[:rows] if weighted else None
        one = (X[:rows], Y[:rows])
        found.append(model.evaluate(*one, sample_weight=given, batch_size=5, verbose=0))
    return found


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "run", [trained_now_and_then_with_weights, evaluated_now_and_then_with_weights]
)
def test_weights_now_and_then(run: Any, mesh: str, stages: bool) -> None:
    same(dense, run, mesh, stages=stages)


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_of_outputs_after_a_fall_back(mesh: str) -> None:
    """A smaller last batch, of a model of which DTensor runs nothing over inner axes."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        x = inputs = keras.Input((3, 6))
        x = keras.layers.LSTM(4, name="lstm")(x)
        outputs = [keras.layers.Dense(2, name=name)(x) for name in ("a", "q")]
        return keras.Model(inputs, outputs)

    def run(model: keras.Model) -> list[float]:
        model.compile("adam", ["mse", "mae"])
        data = tf.data.Dataset.from_tensor_slices((T, (Y, Y2))).batch(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = model.fit(data, epochs=2, verbose=0).history
        return [value for name in sorted(history) for value in history[name]]

    same(build, run, mesh)


@pytest.mark.parametrize("mesh", MESHES)
def test_absent_members_of_a_dataset(mesh: str) -> None:
    def run(model: keras.Model) -> list[float]:
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5).map(lambda x, y: (x, y, None))
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        return [*losses, model.evaluate(data, verbose=0)]

    same(dense, run, mesh)


class Absent(keras.Model):
    """One of its outputs is None."""

    def __init__(self) -> None:
        super().__init__()
        self.a = keras.layers.Dense(4, name="a")
        self.b = keras.layers.Dense(2, name="b")

    def call(self, x: Any) -> Any:
        return {"out": self.b(self.a(x)), "more": None}


@pytest.mark.parametrize("mesh", MESHES)
def test_absent_outputs(mesh: str) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = Absent()
        model(X[:1])
        return model

    def run(model: keras.Model) -> list[float]:
        model.compile("sgd", {"out": "mse"})
        fit = model.fit(X, {"out": Y}, batch_size=5, shuffle=False, verbose=0)
        return list(fit.history["loss"])

    same(build, run, mesh)


class Sum(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = keras.layers.Dense(2, name="a")

    def call(self, x: Any) -> Any:
        return self.a(x["x"] + x["b"])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("member", ["input", "target", "scalar"])
@pytest.mark.parametrize("mesh", MESHES)
def test_members_of_other_lengths_are_refused(mesh: str, member: str, known: bool) -> None:
    model = Sum()
    model({"x": X[:1], "b": X[:1]})
    model = on(model, mesh)
    model.compile("sgd", "mse")

    def element(x: Any, y: Any) -> Any:
        other = {"input": x[:1], "scalar": tf.constant(1.0, tf.float64)}.get(member, x)
        return {"b": other, "x": x}, (y[:-2] if member == "target" else y)

    data = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(5, drop_remainder=known)
    error = r"(?i)inputs, targets and weights (of a batch )?have as many rows"
    if member == "target" and known:  # Keras looks at its loss first
        error = "Dimensions must be equal"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=error):
        model.fit(data.map(element), verbose=0)


def test_a_mean_of_integers_is_none_of_them() -> None:
    model = on(dense(), "data2")
    found = kdist.reduce(model, lambda x: tf.reduce_max(x), np.arange(8))
    np.testing.assert_allclose(found, (3 + 7) / 2)
