"""Models with a `train_step` of their own, compared with one device."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


def over_plain(mesh: str, one: keras.Model, **options: Any) -> keras.Model:
    """Over a mesh, with no weight cut by the layout map."""
    axes, level = MESHES[mesh]
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=optimizer, **options)
    return kdist.parallelize(one, config)


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


class Counting(keras.Model):
    """Counts its steps in a variable that is no weight, and learns by what it holds."""

    def __init__(self, network: keras.Model, what: str, held: Any) -> None:
        super().__init__()
        self.network, self.what, self.held = network, what, held
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.rate = tf.Variable(0.5, trainable=False)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError

    def call(self, x: Any) -> Any:
        return self.network(x)

    def train_step(self, x: Any) -> dict[str, Any]:
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True))) * HELD[self.what][1](self.held)
            loss *= tf.cast(self.count + 1, loss.dtype) * tf.cast(self.rate, loss.dtype)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.rate.assign(0.9 * self.rate)
        return {"loss": loss}


class Pair(NamedTuple):
    first: float
    second: float


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    factor: float


class Kind(enum.Enum):
    TWICE = 2.0


def times(x: float, y: float) -> float:
    return x * y


HELD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a named tuple": (Pair(2.0, 3.0), lambda held: held.second),
    "settings": (Settings(2.0), lambda held: held.factor),
    "settings with slots": (Slotted(2.0), lambda held: held.factor),
    "arguments": (argparse.Namespace(factor=2.0), lambda held: held.factor),
    "one of several": (Kind.TWICE, lambda held: held.value),
    "a part of a function": (functools.partial(times, 2.0), lambda held: held(2.0)),
    "an array": (np.full(3, 2.0), lambda held: held.sum()),
    "a schedule": (
        keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5),
        lambda held: tf.cast(held(3), tf.float64),
    ),
}


@pytest.mark.parametrize("what", HELD)
def test_a_twin_has_what_the_model_holds(what: str) -> None:
    network = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    one = over_plain("data", Counting(network, what, HELD[what][0]))
    one.compile(keras.optimizers.Adam(0.01))
    report = kdist.verify(one, batch()[0])
    assert report.ok, report
    assert int(one.count) == 0
    assert float(one.rate) == 0.5


class Exhausted(Own):
    """Its step asks a generator for more than it has, which `fit` takes for the end of the data."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": next(iter(()))}


def test_a_step_that_was_not_made_is_not_equal() -> None:
    one = over("data", model(Exhausted))
    one.compile(keras.optimizers.Adam(0.01), "mse")
    with pytest.raises(ValueError, match=r"(?s)leave verify out.*ran no step.*StopIteration"):
        kdist.verify(one, *batch())


class OwnCompile(Own):
    def compile(self, far: Any, beside: Any = None) -> None:
        super().compile(optimizer=far, loss="mse")
        self.beside = beside and (lambda x: beside(x))


class Holding(Coder):
    """Holds something of which nobody can make a second one; `get_config` is not its own."""

    def __init__(self, width: int, held: Any) -> None:
        super().__init__(width)
        self.held = held

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError


def with_default(layer: keras.Layer) -> Callable[..., Any]:
    """A function that has a layer as the default of an argument."""
    return lambda x, inside=layer: inside(x)


REFUSED = {
    "a layer for compile": (
        lambda: (model(OwnCompile), {"beside": layers.ReLU()}),
        r"OwnCompile.*takes a layer, 're_lu.*make it an attribute",
    ),
    "a layer by default": (
        lambda: (Holding(5, with_default(layers.Dense(2))), {}),
        r"Holding.*Holding\.held, a function.*get_config",
    ),
    "a closure": (
        lambda: (Holding(5, (lambda one: lambda x: one(x))(layers.Dense(2))), {}),
        r"Holding.*Holding\.held, a function.*get_config",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_made_again_is_refused(what: str) -> None:
    make, words = REFUSED[what]
    one, given = make()
    one = over_plain("data", one, verify="first_step")
    one.compile(keras.optimizers.Adam(0.01), **given)
    words = rf"(?s)twins of a model with its own `train_step`.*leave verify out.*{words}"
    with pytest.raises(ValueError, match=words):
        one.fit(*(batch()[:1] if given == {} else batch()), verbose=0)


def test_a_compile_that_nobody_saw_is_refused() -> None:
    one = model(OwnCompile)
    one.compile(keras.optimizers.Adam(0.01))
    one = over_plain("data", one)
    with pytest.raises(ValueError, match=r"(?s)leave verify out.*not known: compile it again"):
        kdist.verify(one, *batch())
    one.compile(keras.optimizers.Adam(0.01))
    assert kdist.verify(one, *batch()).ok


def test_a_step_of_no_model_is_refused() -> None:
    one = over("data", model(), verify="first_step")
    with pytest.raises(ValueError, match=r"(?s)kdist\.function.*Leave verify out.*'first_step'"):
        kdist.function(lambda x: one(x), one)
