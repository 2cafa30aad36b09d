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


@pytest.mark.parametrize("kind", [Jacobians, OneByOne])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_many_at_once(axes: dict[str, int], kind: type) -> None:
    models = pair(axes, kind)
    models[0].fit(*batch(10), batch_size=5, epochs=2, verbose=0, shuffle=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        models[1].fit(*batch(10), batch_size=5, epochs=2, verbose=0, shuffle=False)
    same(models)
    told = any("computes on one device" in str(one.message) for one in said)
    assert told == (kind is OneByOne or "model" in axes)
