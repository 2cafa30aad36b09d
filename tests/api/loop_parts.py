"""Custom training loops: the gradients that a plain tape gives, and models to take them of."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..parity import mlp, pair


def plain_gradients(model: keras.Model, x: Any, y: Any, weight: Any = None) -> tuple:
    """Loss and gradients of a batch by a tape; None where the loss does not depend on a weight."""
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weight, training=True)
    found = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return loss, [None if g is None else tf.convert_to_tensor(g) for g in found]


def compiled(axes: dict, build: Any = mlp, optimizer: Any = None, **options: Any) -> tuple:
    """The same model twice, plain and parallel, with optimizers and losses of their own."""
    models = pair(axes, build)
    for model in models:
        make = optimizer or (lambda: keras.optimizers.Adam(0.01))
        model.compile(make(), **{"loss": "mse", **options})
    return models
