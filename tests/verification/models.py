"""Small models and batches to verify."""

import kdist

import keras
import numpy as np
from keras import layers, ops

from ..equivalence.harness import Run, compiled, precision

MESHES = {
    "data2": {"data": 2},
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


def zoo_model(case, mesh, dtype="float32", **config):
    if "pipe" in mesh:
        config.setdefault("pipeline", kdist.PipelineConfig(micro_batches=2))
    run = Run(
        case=case,
        mesh_axes=mesh,
        optimizer=lambda **options: keras.optimizers.Adam(0.01, **options),
        config=config,
        dtype=dtype,
    )
    with precision(dtype):
        return compiled(run, "kdist")


def small(*middle, axes=None, loss="mse", metrics=(), **config):
    """A compiled model of two Dense layers with something in between."""
    inputs = keras.Input((6,), name="features")
    x = layers.Dense(8, activation="tanh", name="up")(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, layers.Dense(2, name="down")(x), name="small")
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes or {"data": 2}), **config))
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def batch(rows=6):
    rng = np.random.default_rng(0)
    # A mean that drifts along the rows: the replicas' parts are unlike each other.
    x = rng.normal(size=(rows, 6)) + np.linspace(-1, 1, rows)[:, None]
    return x.astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def observable(model):
    """Everything that must stay, bit by bit."""
    variables = [*model.variables, *model.optimizer.variables]
    for metric in model.metrics:
        variables += metric.variables
    return [keras.ops.convert_to_numpy(v) for v in variables]


class Centre(layers.Layer):
    """Takes the mean over the batch off."""

    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Wrapped(keras.Model):
    """Cannot be made again: it has no configuration, and holds what nobody knows how to copy."""

    def __init__(self, inner):
        super().__init__(name="wrapped")
        self.inner, self.held = inner, object()

    def call(self, inputs, training=False):
        return self.inner(inputs, training=training)


def wrapped(*middle, **config):
    inner = [layers.Dense(8, activation="tanh", name="up"), *middle, layers.Dense(2, name="down")]
    model = Wrapped(keras.Sequential([keras.Input((6,)), *inner]))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), **config))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model
