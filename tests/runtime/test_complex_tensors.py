"""Complex tensors have gradients where programs are cut: between stages, before a whole loss."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ..parity import assert_close, compile_all, config, fit_all

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 8))


@keras.saving.register_keras_serializable("test_complex_tensors")
class Spectrum(layers.Layer):
    """The Fourier transform of its input's rows, as complex numbers."""

    def call(self, x: Any) -> Any:
        return tf.signal.fft(tf.cast(x, tf.complex128))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, "complex128")


@keras.saving.register_keras_serializable("test_complex_tensors")
class Signal(layers.Layer):
    """The real part of the inverse transform of what it is given, turned by an angle."""

    def call(self, x: Any) -> Any:
        return tf.math.real(tf.signal.ifft(x * tf.constant(0.8 + 0.6j, tf.complex128)))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, "float64")


def filtered() -> keras.Model:
    """Of two stages, the first ends with complex numbers that the second takes twice."""
    x = inputs = keras.Input((6,))
    first = [layers.Dense(8, "tanh", name="up"), Spectrum(name="spectrum")]
    for layer in first:
        kdist.set_stage(layer, 0)
        x = layer(x)
    signal, down = Signal(name="signal"), layers.Dense(8, name="down")
    for layer in (signal, down):
        kdist.set_stage(layer, 1)
    y = down(signal(x))
    return keras.Model(inputs, layers.Add(name="add")([y, Signal(name="again")(x)]))


class Judged(keras.Model):
    """A loss of the user's own over complex outputs."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.square(tf.abs(y_pred) - y))


def judged() -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(8, name="down")(layers.Dense(8, "tanh", name="up")(inputs))
    return Judged(inputs, Spectrum(name="spectrum")(x))


def train(build: Any, other: kdist.ParallelConfig, **options: Any) -> None:
    models = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        models.append(kdist.parallelize(build(), other) if parallel else build())
    compile_all(models, metrics=None, **options)
    fit_all(models, lambda: (X, Y), batch_size=8, epochs=2)
    assert_close(*[np.abs(model.predict(X, verbose=0)) for model in models])


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_across_stages(schedule: str, eager: bool) -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule=schedule)
    other = kdist.ParallelConfig(mesh=kdist.mesh(pipe=2), pipeline=pipeline)
    train(filtered, other, run_eagerly=eager)


def test_across_stages_with_inner_axes() -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2)
    train(filtered, config({"pipe": 2, "model": 2}, pipeline=pipeline))


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_before_a_whole_loss(axes: dict[str, int]) -> None:
    train(judged, config(axes))
