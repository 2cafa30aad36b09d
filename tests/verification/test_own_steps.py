"""Models with a `train_step` of their own, compared with one device."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.calls.over_mesh import OverMesh

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops


class Own(keras.Model):
    """Two losses, one of them by hand; names of logs are its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            size = ops.mean(ops.square(found))
            loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=weight) + 0.1 * size
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {**self.compute_metrics(x, y, found, weight), "far": loss, "size": size}


def model(kind: type = Own) -> keras.Model:
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    return kind(first, layers.Dense(3, name="down")(hidden))


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(12, 6)), rng.normal(size=(12, 3))


CUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "data": ({"data": 3}, 0),
    "inner": ({"data": 2, "model": 2}, 0),
    "level 3": ({"data": 4}, 3),
}


def over(mesh: str, one: keras.Model, **options: Any) -> keras.Model:
    axes, level = MESHES[mesh]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=CUTS if "model" in axes else {},
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
        **options,
    )
    return kdist.parallelize(one, config)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_step_returns_and_leaves_is_compared(mesh: str) -> None:
    one = over(mesh, model())
    one.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    before = [w.copy() for w in one.get_weights()]
    report = kdist.verify(one, *batch())
    assert report.ok, report
    assert report.dtype == "float64"
    # loss and mae; far and size are no metrics that the model is compiled with.
    assert report.compared == {
        "output": 1, "loss": 1, "metric": 3, "state": 0, "weight": 4, "slot": 10,
    }  # fmt: skip
    assert "not compared: training_output, gradient" in str(report)
    assert any("Own.train_step is the model's own" in note for note in report.notes)
    for was, now in zip(before, one.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)
    one.fit(*batch(), verbose=0)
    assert kdist.verify(one, *batch()).ok


def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = over("data", model())
    one.compile(keras.optimizers.Adam(0.01), "mse")
    summed = OverMesh._summed

    def twice(call: OverMesh, gradients: Any) -> Any:
        found = summed(call, gradients)
        return [[2 * t for t in found[0]], *found[1:]]

    monkeypatch.setattr(OverMesh, "_summed", twice)
    report = kdist.verify(one, *batch())
    assert not report.ok
    assert {d.kind for d in report.differences} == {"weight", "slot"}


def test_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (over("data", model(), verify=how) for how in ("first_step", None))
    for each in (one, other):
        each.compile(keras.optimizers.Adam(0.01), "mse")
        each.fit(*batch(), batch_size=4, epochs=2, verbose=0, shuffle=False)
    assert "verify='first_step'" in capsys.readouterr().out
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@keras.saving.register_keras_serializable("kdist_tests")
class Coder(keras.Model):
    """Without `call`; its step takes inputs alone, draws, and keeps a statistic."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        first, last = keras.Input((6,)), keras.Input((width,))
        hidden = layers.Dropout(0.3)(layers.Dense(width, "tanh")(first))
        self.encoder = keras.Model(first, hidden)
        self.decoder = keras.Model(last, layers.Dense(6)(layers.BatchNormalization()(last)))
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean((self.decoder(self.encoder(x, training=True), training=True) - x) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"far": loss}


def test_a_model_without_call_whose_random_layers_are_explained() -> None:
    one = over("data", Coder(5))
    one.compile(keras.optimizers.Adam(0.01))
    report = kdist.verify(one, batch()[0])
    assert report.ok, report
    assert {name.rpartition("_")[0] or name for name in report.explained_by} >= {"dropout"}


class OwnCompile(Own):
    def compile(self, far: Any) -> None:
        super().compile(optimizer=far)


def test_a_model_that_cannot_be_made_again_is_refused() -> None:
    one = over("data", model(OwnCompile), verify="first_step")
    one.compile(keras.optimizers.Adam(0.01))
    words = r"(?s)twins of a model with its own `train_step`.*leave verify out.*OwnCompile.*compile"
    with pytest.raises(ValueError, match=words):
        one.fit(*batch(), verbose=0)


def test_a_step_of_no_model_is_refused() -> None:
    one = over("data", model(), verify="first_step")
    with pytest.raises(ValueError, match=r"(?s)kdist\.function.*Leave verify out.*'first_step'"):
        kdist.function(lambda x: one(x), one)
