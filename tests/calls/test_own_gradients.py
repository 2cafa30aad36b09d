"""Gradients of own steps that are more than one per weight and step, or come from elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from .step_parts import IDS, MESHES, Own, batch, pair, same

pytestmark = pytest.mark.usefixtures("float64")


class Accumulating(Own):
    """Adds up gradients in variables, and applies those, now and then."""

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        for total, gradient in zip(self.totals, tape.gradient(loss, self.trainable_variables)):
            total.assign_add(gradient)
        self.steps.assign_add(1)
        tf.cond(self.steps % 2 == 0, self.apply_totals, lambda: None)
        return {"far": loss}

    def apply_totals(self) -> None:
        self.optimizer.apply(self.totals, self.trainable_variables)
        for total in self.totals:
            total.assign(tf.zeros(total.shape, total.dtype))


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_gradients_that_variables_add_up(axes: dict[str, int], kind: type) -> None:
    models = pair(axes, Accumulating)
    for model in models:
        zeros = [np.zeros(v.shape) for v in model.trainable_variables]
        model.totals = [kind(zero, trainable=False) for zero in zeros]
        model.steps = tf.Variable(0, trainable=False)
        model.fit(*batch(26), batch_size=5, epochs=2, verbose=0, shuffle=False)
    same(models)


class Jacobians(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self(x, training=True)
        slopes = tf.stop_gradient(tape.jacobian(found, x))
        return super().loss_of(x + 0.1 * ops.sum(slopes, axis=(0, 1)), y)


class OneByOne(Own):
    """A gradient per row, cut to a length, as differential privacy wants."""

    def train_step(self, data: Any) -> dict[str, Any]:
        def of_row(row: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(*(part[None] for part in row))
            gradients = tape.gradient(loss, self.trainable_variables)
            return tf.clip_by_global_norm(gradients, 0.5)[0]

        each = tf.vectorized_map(of_row, data)
        self.optimizer.apply([ops.mean(g, axis=0) for g in each], self.trainable_variables)
        return {"far": self.loss_of(*data)}


class JacobianPenalty(Own):
    """Learns from a jacobian: a gradient of many gradients at once."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self(x, training=True)
        slopes = tape.batch_jacobian(found, x)
        return ops.mean((found - y) ** 2) + ops.mean(slopes**2)


class Inside(Own):
    """The same in its `call`, which gives one number."""

    def call(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = super().call(x)
        return ops.mean(found**2) + ops.mean(tape.batch_jacobian(found, x) ** 2)

    def loss_of(self, x: Any, y: Any) -> Any:
        return self(x)


class Curved(Own):
    """A gradient of a gradient in its `call`, which gives one number."""

    def call(self, x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = super().call(x)
            slope = tape.gradient(found, x)
        return ops.mean(found**2) + ops.mean((outer.gradient(slope, x) - 1.0) ** 2)

    def loss_of(self, x: Any, y: Any) -> Any:
        return self(x)


@pytest.mark.parametrize("kind", [Jacobians, OneByOne, JacobianPenalty, Inside, Curved])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_many_at_once(axes: dict[str, int], kind: type) -> None:
    models = pair(axes, kind)
    models[0].fit(*batch(10), batch_size=5, epochs=2, verbose=0, shuffle=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        models[1].fit(*batch(10), batch_size=5, epochs=2, verbose=0, shuffle=False)
    same(models)
    assert any("computes on one device" in str(one.message) for one in said)


class Sloped(Own):
    """A gradient of a gradient, in a `tf.function` that the step calls, and updates in another."""

    @tf.function
    def penalty(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self(x, training=True)
        size = ops.mean(ops.square(tape.gradient(found, x)))
        return 2.0 * size if size > 0.1 else size

    @tf.function
    def update(self, gradients: Any) -> None:
        self.optimizer.apply(gradients, self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data) + self.penalty(data[0])
        self.update(tape.gradient(loss, self.trainable_variables))
        return {"far": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_functions_that_a_step_calls_are_traced_again_with_it(axes: dict[str, int]) -> None:
    """One from the trace before would ask again for what has no way over the mesh, without end."""
    models = pair(axes, Sloped)
    for model in models:
        model.optimizer.build(model.trainable_variables)  # no variables are made inside
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    same(models)


class Compiled(Own):
    @tf.function(jit_compile=True)
    def far(self, x: Any, y: Any) -> Any:
        return ops.mean((x - y) ** 2)

    def loss_of(self, x: Any, y: Any) -> Any:
        return self.far(self(x, training=True), y)


class CompiledCall(Own):
    loss_of = tf.function(Own.loss_of, jit_compile=True)


class CompiledUpdate(Own):
    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        tf.function(lambda g: self.optimizer.apply(g, weights), jit_compile=True)(gradients)
        return {"far": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_functions_for_xla(axes: dict[str, int]) -> None:
    """They are of one device: a loss is, a call of a layer and an update are not."""
    models = pair(axes, Compiled)
    for model in models:
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    same(models)
    for kind, what in ((CompiledCall, "A call of layer"), (CompiledUpdate, "An update by 'adam")):
        with pytest.raises(ValueError, match=rf"{what}.*jit_compile=True out.*Received"):
            pair(axes, kind)[1].fit(*batch(), verbose=0)


class Picked(Own):
    """A loss over some rows of what the model makes, one twice: a graph's labelled nodes."""

    def loss_of(self, x: Any, y: Any) -> Any:
        rows = tf.constant([2, 0, 2])
        return ops.mean((tf.gather(self(x, training=True), rows) - tf.gather(y, rows)) ** 2)


@pytest.mark.parametrize("semantics", ["global", "replica"])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_gradients_of_looked_up_rows(axes: dict[str, int], semantics: str) -> None:
    models = pair(axes, Picked, batch_semantics=semantics)
    for model in models:
        model.fit(*batch(11), batch_size=4, verbose=0, shuffle=False)
    same(models)
