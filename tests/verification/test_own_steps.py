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

from .own_steps import MESHES, Coder, batch, model, over, over_plain


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


def test_a_model_without_call_whose_random_layers_are_explained() -> None:
    one = over("data", Coder(5))
    one.compile(keras.optimizers.Adam(0.01))
    report = kdist.verify(one, batch()[0])
    assert report.ok, report
    assert {name.rpartition("_")[0] or name for name in report.explained_by} >= {"dropout"}


class Adversaries(keras.Model):
    """As guides write them: networks for the constructor, optimizers for a `compile` of its own."""

    def __init__(self, critic: keras.Model, generator: keras.Model, width: int) -> None:
        super().__init__()
        self.critic, self.generator, self.width = critic, generator, width
        self.seed_generator = keras.random.SeedGenerator(7)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")]
        self.scale = tf.constant([1.0, 0.5])

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real: Any) -> dict[str, Any]:
        rows = ops.shape(real)[0]
        noise = keras.random.normal((rows, self.width), seed=self.seed_generator)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], 0)
        with tf.GradientTape() as tape:
            judged = self.critic(ops.concatenate([self.generator(noise), real], 0))
            d_loss = self.loss_fn(labels, judged) * self.scale[0]
        weights = self.critic.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            judged = self.critic(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), judged) * self.scale[1]
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        for tracker, value in zip(self.trackers, (d_loss, g_loss)):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Kept(Adversaries):
    """Has its optimizers in a dict."""

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        keras.Model.compile(self)
        self.kept = {"d": d_optimizer, "g": g_optimizer}
        self.loss_fn = loss_fn

    d_optimizer = property(lambda self: self.kept["d"])  # type: ignore[assignment]
    g_optimizer = property(lambda self: self.kept["g"])  # type: ignore[assignment]


def adversaries(
    mesh: str = "inner", kind: type[Adversaries] = Adversaries, **options: Any
) -> keras.Model:
    def network(inputs: int, outputs: int) -> keras.Model:
        first = keras.Input((inputs,))
        hidden = layers.Dense(8, "tanh", name="up")(first)
        return keras.Model(first, layers.Dense(outputs, name="down")(hidden))

    keras.utils.set_random_seed(0)
    one = over_plain(mesh, kind(network(6, 1), network(2, 6), 2), **options)
    one.compile(
        keras.optimizers.Adam(0.01),
        g_optimizer=keras.optimizers.RMSprop(0.01),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return one


@pytest.mark.parametrize(
    ("mesh", "kind"), [("inner", Adversaries), ("level 3", Adversaries), ("data", Kept)]
)
def test_a_model_of_networks_with_a_compile_of_its_own(mesh: str, kind: type[Adversaries]) -> None:
    one, (x, _) = adversaries(mesh, kind), batch()
    before = [w.copy() for w in one.get_weights()]
    for _ in range(2):
        report = kdist.verify(one, x)
        assert report.ok, report
        assert report.dtype == "float64"
        # Of each network 4 weights; of each optimizer moments, a count and a rate.
        assert report.compared["weight"] == 4 + 4
        assert report.compared["slot"] == (8 + 2) + (4 + 2)
        for was, now in zip(before, one.get_weights(), strict=True):
            np.testing.assert_array_equal(was, now)
        one.fit(x, verbose=0)  # optimizers that have state by now
        before = [w.copy() for w in one.get_weights()]


def test_a_mistake_beside_the_compiled_optimizer_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, (x, _) = adversaries("data"), batch()
    one.fit(x, verbose=0)
    summed = OverMesh._summed

    def twice(call: OverMesh, gradients: Any) -> Any:
        found = summed(call, gradients)
        return [[2 * t for t in found[0]], *found[1:]] if found else found

    monkeypatch.setattr(OverMesh, "_summed", twice)
    report = kdist.verify(one, x)
    assert not report.ok
    names = {d.name.split("/")[0] for d in report.differences if d.kind == "slot"}
    assert names == {"d_optimizer", "g_optimizer"}


def test_the_first_step_of_a_model_of_networks(capsys: pytest.CaptureFixture[str]) -> None:
    one, (x, _) = adversaries("data", verify="first_step"), batch()
    one.fit(x, verbose=0)
    assert "verify='first_step': Equal to one device (float64" in capsys.readouterr().out


def test_a_step_of_no_model_is_refused() -> None:
    one = over("data", model(), verify="first_step")
    with pytest.raises(ValueError, match=r"(?s)kdist\.function.*Leave verify out.*'first_step'"):
        kdist.function(lambda x: one(x), one)
