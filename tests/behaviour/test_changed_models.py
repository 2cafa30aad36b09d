"""Models that change after `parallelize`: LoRA, quantization, frozen and new layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
from keras import layers

CUTS = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
MESHES = {
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
}
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(12, 6)), RANDOM.normal(size=(12, 4))


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh", name="up"),
            layers.Dense(8, "tanh", name="down"),
            layers.Dense(4, name="head"),
        ]
    )


def parallel(mesh: str, level: int = 0) -> keras.Model:
    axes = MESHES[mesh]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=CUTS if "model" in axes else None,
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
    )
    return kdist.parallelize(build(), config)


def fit(model: keras.Model, compile: bool = True) -> None:
    if compile:
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)


def lora_first(model: keras.Model) -> None:
    model.layers[0].enable_lora(2)
    fit(model)


def lora(model: keras.Model) -> None:
    fit(model)
    model.layers[0].enable_lora(2)
    fit(model)


def frozen(model: keras.Model) -> None:
    fit(model)
    model.layers[0].trainable = False
    fit(model)


def thawed(model: keras.Model) -> None:
    model.layers[0].trainable = False
    fit(model)
    model.layers[0].trainable = True
    fit(model)


def grown(model: keras.Model) -> None:
    fit(model)
    model.add(layers.Dense(4, kernel_initializer="ones", name="more"))
    fit(model)


def shrunk(model: keras.Model) -> None:
    """The layer of a pattern of the map is taken away."""
    fit(model)
    model.pop()
    model.pop()
    model.add(layers.Dense(4, kernel_initializer="ones", name="end"))
    fit(model)


def quantized(model: keras.Model) -> None:
    """Keras forgets the functions it made, so this works without `compile`."""
    fit(model)
    model.quantize("int8")


def quantized_and_compiled(model: keras.Model) -> None:
    quantized(model)
    model.compile("sgd", "mse")
    model.evaluate(X, Y, verbose=0)


CHANGES = (lora_first, lora, frozen, thawed, grown, shrunk, quantized, quantized_and_compiled)
DEFAULT = {
    (lora, "data4", 3),
    (lora_first, "data2_model2", 0),
    (grown, "pipe2_data2", 0),
    (shrunk, "data2_model2", 3),
    (quantized_and_compiled, "data2_model2", 3),
    (quantized, "pipe2_data2", 0),
}
ROWS = [
    pytest.param(change, mesh, level, marks=() if row in DEFAULT else (pytest.mark.long,))
    for change in CHANGES
    for mesh in MESHES
    for level in (0, 3)
    for row in [(change, mesh, level)]
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("change", "mesh", "level"), ROWS)
def test_the_next_compile_takes_changes_up(change: Callable, mesh: str, level: int) -> None:
    plain, other = build(), parallel(mesh, level)
    for model in (plain, other):
        keras.utils.set_random_seed(2)
        change(model)
    assert len(plain.weights) == len(other.weights)
    # Keras keeps LoRA's own weights in float32, whatever the policy.
    near = 1e-6 if any("lora" in v.path for v in plain.weights) else 1e-9
    for a, b in zip(plain.get_weights(), other.get_weights()):
        np.testing.assert_allclose(a.astype("float64"), b.astype("float64"), rtol=near, atol=near)
    predictions = [m.predict(X, verbose=0) for m in (plain, other)]
    np.testing.assert_allclose(*predictions, rtol=near, atol=near)


@pytest.mark.parametrize("mesh", ["data4", pytest.param("pipe2_model2", marks=pytest.mark.long)])
def test_training_on_without_compile_is_refused(mesh: str) -> None:
    model = parallel(mesh)
    fit(model)
    model.layers[0].enable_lora(2)
    with pytest.raises(ValueError, match=r"(?s)compile\(\.\.\.\) again.*lora_kernel_a"):
        fit(model, compile=False)
    assert model.predict(X, verbose=0).shape == (12, 4)
    with pytest.raises(ValueError, match="again before training goes on"):
        model.train_on_batch(X, Y)
    fit(model)


def test_fusion_is_not_changed_between_freezing_and_compile() -> None:
    model: Any = parallel("data4")
    fit(model)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="compile"):
        attached(model).set_fusion(kdist.FusionConfig(mode="none"))
    fit(model)


@pytest.mark.parametrize("mesh", ["data2_model2", "pipe2_data2"])
def test_a_model_that_predicted_before_and_was_never_compiled(mesh: str, float64: None) -> None:
    """What Keras traced reads its weights where they were."""
    model = build()
    before = model.predict(X, verbose=0)
    layout_map = CUTS if "model" in mesh else None
    pipeline = kdist.PipelineConfig(micro_batches=2) if "pipe" in mesh else None
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**MESHES[mesh]), layout_map=layout_map, pipeline=pipeline
    )
    kdist.parallelize(model, config)
    np.testing.assert_allclose(model.predict(X, verbose=0), before, rtol=1e-9)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.layers[0].enable_lora(2), lambda model: model.layers[0].quantize("int8")],
    ids=["lora", "quantize"],
)
def test_a_changed_model_is_looked_at_before_compile(change: Callable) -> None:
    model = parallel("data4", level=3)
    fit(model)
    change(model)
    assert str(kdist.inspect(model))
    weights = model.plan().weights
    assert [one.path for one in weights] == [v.path for v in model.weights]
    assert any(one.gathered for one in weights)
    with pytest.raises(ValueError, match="weights have changed since compile"):
        fit(model, compile=False)


def test_a_model_at_level_3_is_looked_at_before_compile() -> None:
    model = parallel("data4", 3)
    for look in (model.plan, lambda: kdist.inspect(model)):
        assert "level=3 stores weights from compile() with an optimizer on" in str(look())
    assert not any(one.gathered for one in model.plan().weights)
    model.compile("sgd", "mse")
    assert any(one.gathered for one in model.plan().weights)
    assert "level=3 stores weights" not in str(model.plan())
