"""Whether XLA compiles a model's steps: what of it is private to Keras."""

from __future__ import annotations

import types

from kdist._compat import keras_xla

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import mlp


class Unable(keras.layers.Layer):
    """XLA cannot compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_jit = False


@pytest.mark.parametrize(("kinds", "able"), [("CPU", True), ("CPU GPU", True), ("CPU GPU", False)])
def test_compiles_by_itself(kinds: str, able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [keras.Input((2,)), keras.layers.Dense(1), *([] if able else [Unable()])]
    model = keras.Sequential(layers)
    found = [types.SimpleNamespace(device_type=one) for one in kinds.split()]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *args: found)
    assert keras_xla.compiles_by_itself(model) == ("GPU" in kinds and able)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, keras_xla.LEFT_OPEN),
        ({"jit_compile": False}, False),
        ({"jit_compile": True}, True),
        ({"run_eagerly": True}, False),
    ],
)
def test_auto_left_open(given: dict[str, bool], expected: bool | str) -> None:
    model = mlp()
    with keras_xla.auto_left_open(model):
        model.compile("sgd", "mse", **given)
    assert model.jit_compile == model.get_compile_config()["jit_compile"] == expected
    assert "_resolve_auto_jit_compile" not in vars(model)


def test_leave_out_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU."""
    found = [types.SimpleNamespace(device_type="GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *args: found)
    model = mlp()
    beside = keras.Model(model.input, model.get_layer("up").output)
    for layer in (model, *model.layers):
        keras_xla.leave_out_xla(layer)
    assert not beside.jit_compile
    assert keras_xla.compiles_by_itself(model)


@pytest.mark.parametrize("able", [True, False])
def test_layers_as_made(able: bool) -> None:
    layer = keras.layers.Dense(1) if able else Unable()
    model = keras.Sequential([keras.Input((2,)), layer])
    keras_xla.leave_out_xla(layer)
    with keras_xla.layers_as_made(model):
        assert layer.supports_jit is able
    assert not layer.supports_jit


def test_forget_functions() -> None:
    model = mlp()
    model.compile("sgd", "mse", jit_compile=True)
    x = np.ones((2, 6))
    before = model.predict(x, verbose=0)
    keras_xla.forget_functions(model)
    assert model.jit_compile
    keras_xla.leave_out_xla(model.layers[1])
    keras_xla.forget_functions(model)
    assert not model.jit_compile
    model.get_layer("down").bias.assign_add(np.ones(3))
    np.testing.assert_allclose(model.predict(x, verbose=0), before + 1, rtol=1e-6)


def test_forget_made() -> None:
    """By the names that Keras uses, which KerasHub goes on with."""
    model = mlp()
    model.make_train_function()
    kept, made = model.train_function, tf.function(len)
    for name, value, make in (
        ("draw", made, lambda: made),
        ("other", made, None),
        ("anew", made, lambda: tf.function(len)),
        ("scaled", made, lambda scale: made),
        ("plain", len, lambda: len),
    ):
        setattr(model, f"{name}_function", value)
        setattr(model, f"make_{name}_function", make)
    keras_xla.forget_made(model)
    assert model.draw_function is None and model.plain_function is len
    assert [model.other_function, model.anew_function, model.scaled_function] == 3 * [made]
    assert model.train_function is kept


def test_save_as_auto():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with keras_xla.auto_left_open(model):
        model.compile("sgd", "mse", jit_compile="auto")
    assert keras_xla.save_as_auto(model) == "auto" == model.get_compile_config()["jit_compile"]
