"""Quantized layers and those with factors of LoRA are compared as others are."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest
from keras import layers, ops

from .models import batch, wrapped

TWIN = "a twin of the model on one device, and one over the mesh"


def _dense(mode: str, policy: str | None, kind: type = layers.Dense) -> layers.Layer:
    """A layer that is quantized, or has factors of LoRA, after it was built."""
    dense = kind(8, name="mid", dtype=policy)
    dense.build((None, 8))
    for step in filter(None, mode.split("+")):
        if step == "lora":
            dense.enable_lora(2)
        else:
            dense.quantize(step)
    return dense


def _compiled(*middle: layers.Layer) -> keras.Model:
    inputs = keras.Input((6,), name="features")
    x = layers.Dense(8, activation="tanh", name="up")(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, layers.Dense(2, name="down")(x), name="small")
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("float8", None),  # made again, its weights are in another order
        ("", "float8_from_mixed_bfloat16"),  # Keras cannot run it op by op
        ("lora", "int8_from_mixed_bfloat16"),  # nor this
        pytest.param("", "float8_from_float32", marks=pytest.mark.long),
        pytest.param("int8+lora", None, marks=pytest.mark.long),
    ],
)
def test_quantized_models_are_compared_in_float64(mode: str, policy: str | None) -> None:
    report = kdist.verify(_compiled(_dense(mode, policy)), *batch())
    assert report.ok and report.differences == () and report.way == TWIN, report


def test_biases_of_float8_are_bfloat16() -> None:
    """A model that has trained: its biases are not zero, and those of its twin are not rounded."""
    model = _compiled(_dense("float8", None))
    model.fit(*batch(), epochs=3, verbose=0)
    report = kdist.verify(model, *batch())
    assert report.ok and report.way == TWIN and report.dtype == "float64", report
    assert kdist.verify(model, *batch(), dtype="own").ok


def test_factors_of_lora_are_float32_in_float64_too() -> None:
    report = kdist.verify(_compiled(_dense("lora", None)), *batch())
    assert report.ok and report.way == TWIN, report
    exact = report.tolerance.relative["gradient"] == 1e-9  # by luck
    assert exact != any("'mid/lora_kernel_a'" in note for note in report.notes)


def test_parts_of_a_model_may_compute_in_fewer_bits() -> None:
    """A model itself is compared as its least exact layer allows."""
    model = wrapped(layers.Dense(8, dtype="mixed_bfloat16"), layers.Dropout(0.5, name="drop"))
    report = kdist.verify(model, *batch())
    assert report.ok and "the model itself" in report.way, report
    assert report.tolerance.relative["output"] > 0.01


class Noisy(layers.Dense):
    """Adds noise in training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seeds = keras.random.SeedGenerator(1)

    def _noise(self, x: Any) -> Any:
        return x + keras.random.normal(ops.shape(x), seed=self.seeds, dtype=x.dtype)

    def call(self, inputs: Any, training: Any = None) -> Any:
        outputs = super().call(inputs, training)
        return self._noise(outputs) if training else outputs

    def quantized_call(self, inputs: Any, training: Any = None) -> Any:
        outputs = super().quantized_call(inputs, training=training)
        return self._noise(outputs) if training else outputs


class Sampling(Noisy):
    """Adds noise in inference too."""

    def call(self, inputs: Any) -> Any:
        return self._noise(layers.Dense.call(self, inputs))

    def quantized_call(self, inputs: Any) -> Any:
        return self._noise(layers.Dense.quantized_call(self, inputs))


@pytest.mark.parametrize("kind", [Noisy, Sampling])
def test_random_layers_are_switched_off(kind: type) -> None:
    report = kdist.verify(_compiled(_dense("lora", "int8_from_float32", kind)), *batch())
    assert report.ok and report.explained_by == ("mid",), report
    assert report.unexplained == ()
