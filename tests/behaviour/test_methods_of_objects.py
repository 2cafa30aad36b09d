"""Steps and losses that users assign to one model, in the place of a class of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from ..parity import assert_close, config, mlp

pytestmark = pytest.mark.usefixtures("float64")
X = np.random.default_rng(0).normal(size=(26, 6))
Y = np.random.default_rng(1).normal(size=(26, 3))


def perturbed(model: keras.Model) -> None:
    """A step around Keras's, at weights that are moved meanwhile."""
    inside = model.train_step

    def train_step(data: Any) -> Any:
        x, y = data
        kernel = model.trainable_variables[0]
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x, training=True))
        moved = 0.5 * tape.gradient(loss, kernel)
        kernel.assign_add(moved)
        logs = inside(data)
        kernel.assign_sub(moved)
        return logs

    model.train_step = train_step


def evaluated(model: keras.Model) -> None:
    def test_step(data: Any) -> Any:
        x, y = data
        return {"loss": ops.mean(ops.abs(model(x, training=False) - y))}

    model.test_step = test_step


def predicted(model: keras.Model) -> None:
    model.predict_step = lambda data: 2.0 * model(data[0] if isinstance(data, tuple) else data)


def with_a_loss(model: keras.Model) -> None:
    of_keras = model.compute_loss

    def compute_loss(
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = of_keras(x, y, y_pred, sample_weight, training)
        return loss + ops.sqrt(ops.mean(ops.square(y_pred)))

    model.compute_loss = compute_loss


def with_a_metric(model: keras.Model) -> None:
    of_keras = model.compute_metrics

    def compute_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {**of_keras(x, y, y_pred, sample_weight), "largest": ops.max(y_pred)}

    model.compute_metrics = compute_metrics


Assigned = tuple[Callable[[keras.Model], None], ...]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "assigned",
    [(perturbed, evaluated, predicted), (with_a_loss, with_a_metric)],
    ids=["steps", "losses"],
)
def test_assigned_methods_count(assigned: Assigned, before: bool) -> None:
    """As in Keras, where nothing asks whether a class has them."""
    results: list[Any] = []
    for parallel in (False, True):
        model = mlp()
        for assign in assigned if before else ():
            assign(model)
        if parallel:
            kdist.parallelize(model, config({"data": 2, "model": 2}))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        for assign in () if before else assigned:
            assign(model)
        fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, validation_data=(X[:9], Y[:9]), **fit).history
        weights = [np.array(w) for w in model.get_weights()]
        results.append((history, weights, model.predict(X, verbose=0)))
    plain, other = results
    assert plain[0].keys() == other[0].keys()
    assert_close(plain[0], other[0])
    assert_close(plain[1:], other[1:])


def test_verify_says_that_it_cannot_make_such_a_step_again() -> None:
    model = kdist.parallelize(mlp(), config({"data": 2}))
    perturbed(model)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"train_step is an attribute of the object"):
        kdist.verify(model, X, Y)


def test_verify_compares_such_a_loss_on_the_model_itself() -> None:
    model = kdist.parallelize(mlp(), config({"data": 2}))
    with_a_loss(model)
    model.compile("sgd", "mse")
    report = kdist.verify(model, X, Y)
    assert report.ok
    assert "compute_loss is an attribute of the object" in " ".join(str(report).split())


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
@pytest.mark.parametrize("on_object", [True, False])
def test_functions_of_the_users_own_are_refused(kind: str, on_object: bool) -> None:
    """They would be left out."""
    name, model = f"make_{kind}_function", mlp()
    if on_object:
        setattr(model, name, lambda force=False: None)
    else:
        model.__class__ = type("Mine", (keras.Model,), {name: lambda self, force=False: None})
    with pytest.raises(ValueError, match=rf"in {kind}_step, and leave {name} to Keras"):
        kdist.parallelize(model, config({"data": 2}))
    assert name not in vars(model) or on_object


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_a_loss_whose_call_is_assigned_counts(axes: dict[str, int]) -> None:
    """Though it is of one of Keras's classes, whose values are told apart by rows."""
    results = []
    for parallel in (False, True):
        loss, model = keras.losses.MeanSquaredError(), mlp()
        of_keras = loss.call
        loss.call = lambda y, found, call=of_keras: ops.abs(call(y, found) - 1.0)
        if parallel:
            kdist.parallelize(model, config(axes))
        model.compile(keras.optimizers.Adam(0.01), loss)
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
        results.append((history["loss"], [np.array(w) for w in model.get_weights()]))
    assert_close(*results)


class Own(keras.Model):
    """A model with a step of its own."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean((self(data[0], training=True) - data[1]) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        )
        return {"loss": loss}


@pytest.mark.parametrize("method", ["update_step", "apply", "_clip_gradients", "apply_gradients"])
@pytest.mark.parametrize("own_step", [False, True], ids=["fit", "own step"])
@pytest.mark.parametrize("scaled", [False, True])
def test_methods_assigned_to_an_optimizer_are_refused(
    method: str, own_step: bool, scaled: bool
) -> None:
    """Devices update by optimizers of their own, which do not have them."""
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)
    if own_step:
        model = Own(model.inputs, model.outputs)
    setattr(optimizer, method, lambda *given: None)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    kdist.parallelize(model, config({"data": 2}))
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=rf"a subclass of SGD that has {method}\. Received"):
        model.fit(X, Y, batch_size=8, verbose=0)
