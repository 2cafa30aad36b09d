"""`kdist.callbacks.CommFusion`: figures in the logs, and trying bucket sizes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import kdist
from kdist import FusionConfig
from kdist.api.attached import attached
from kdist.callbacks import CommFusion
from kdist.callbacks.comm_fusion import candidates_for

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import CUTS, assert_close, data, mlp

KEYS = {"comm_collectives", "comm_bytes", "comm_seconds", "comm_direct", "comm_joined"}
KEYS |= {"comm_bus_gb_per_s"}
TWO = (FusionConfig(mode="none"), FusionConfig(mode="size", size_mb=1))


def compiled(axes: dict[str, int] | None = None, level: int = 0) -> keras.Model:
    model = mlp()
    if axes is not None:
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**axes),
            layout_map=CUTS if "model" in axes else None,
            optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        )
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize(
    ("axes", "level"), [({"data": 4}, 1), ({"data": 2, "model": 2}, 0), ({"data": 2}, 3)]
)
def test_figures_are_in_the_logs(axes: dict[str, int], level: int) -> None:
    model = compiled(axes, level)
    x, y = data(16)
    weights = None

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            nonlocal weights
            weights = model.get_weights()

    found = model.fit(x, y, epochs=2, verbose=0, callbacks=[Keep(), CommFusion()]).history
    assert set(found) >= KEYS
    planned = model.plan().traffic()
    assert found["comm_collectives"] == [sum(t.collectives for t in planned)] * 2
    assert found["comm_bytes"] == [sum(t.nbytes for t in planned)] * 2
    assert found["comm_joined"] == [sum(t.joined for t in planned)] * 2
    assert (found["comm_joined"][0] > 0) == (level == 1)
    assert np.add(found["comm_direct"], found["comm_joined"]).tolist() == found["comm_collectives"]
    assert all(seconds > 0 for seconds in found["comm_seconds"])
    assert all(bandwidth > 0 for bandwidth in found["comm_bus_gb_per_s"])
    # Measuring sends values as they are.
    assert_close(weights, model.get_weights())


def test_one_replica_communicates_nothing() -> None:
    model = compiled({"data": 1})
    found = model.fit(*data(8), verbose=0, callbacks=[CommFusion()]).history
    assert found["comm_collectives"] == found["comm_bytes"] == found["comm_seconds"] == [0]
    assert found["comm_bus_gb_per_s"] == [0]


def test_tuning_keeps_the_fastest_and_changes_no_result(float64: None) -> None:
    plain, model = compiled(), compiled({"data": 4}, 1)
    x, y = data(48)
    callback = CommFusion(tune=True, candidates=TWO, steps=1)
    expected = plain.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history["loss"]
    found = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert_close(expected, found.history["loss"])
    assert_close(plain.get_weights(), model.get_weights())
    assert_close(
        [v.numpy() for v in plain.optimizer.variables],
        [v.numpy() for v in model.optimizer.variables],
    )
    assert list(callback.tried) == ["none", "buckets of 1 MB"]
    fastest = min(callback.tried, key=callback.tried.__getitem__)
    assert str(attached(model).config.fusion) == fastest
    reduce = next(t for t in model.plan().traffic() if t.what == "reduce")
    assert reduce.collectives == {"none": 4, "buckets of 1 MB": 2}[fastest]


@pytest.mark.parametrize("accumulates", [None, 3])
def test_buckets_that_change_at_level_3(accumulates: int | None, float64: None) -> None:
    """Not: updates the parts that other buckets would cut, of weights that are stored as before."""
    x, y = data(8)

    def model(level: int | None) -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, "tanh") for _ in range(2)]  # alike: biases may be dealt out
        one = keras.Sequential([keras.Input(x.shape[1:]), *layers, keras.layers.Dense(y.shape[1])])
        if level is not None:
            optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
            config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=optimizer)
            kdist.parallelize(one, config)
        one.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulates), "mse")
        return one

    plain, parallel = model(None), model(3)
    cuts = set()
    for fusion in (TWO[1], TWO[0], TWO[1]):
        attached(parallel).set_fusion(fusion)
        expected, found = (one.train_on_batch(x, y) for one in (plain, parallel))
        assert_close(np.asarray(expected), np.asarray(found))
        assert_close(plain.get_weights(), parallel.get_weights())
        entries = attached(parallel).entries_of(parallel.weights)
        cuts.add(tuple(str(entry.placement.layout) for entry in entries))
    assert len(cuts) == 2, "each keeps weights as its buckets update them"
    assert_close(plain.predict(x, verbose=0), parallel.predict(x, verbose=0))
    assert_close(
        [v.numpy() for v in plain.optimizer.variables],
        [v.numpy() for v in parallel.optimizer.variables],
    )


class Owning(keras.Model):
    """Its step applies an optimizer that it is not compiled with."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.own.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_buckets_of_an_optimizer_of_the_models_own(float64: None) -> None:
    """Not: what was made first goes on, and each candidate is timed with the same buckets."""
    x, y = data(8)

    def model(parallel: bool) -> keras.Model:
        base = mlp()
        one = Owning(base.inputs, base.outputs)
        if parallel:
            kdist.parallelize(one, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        one.own = keras.optimizers.Adam(0.01)
        one.compile(None)
        return one

    plain, parallel = model(False), model(True)
    counts = []
    for fusion in TWO:
        attached(parallel).set_fusion(fusion)
        for one in (plain, parallel):
            one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        ((_, _, update),) = attached(parallel).own_updates._made.values()
        counts.append(len(update.jobs.jobs))
    assert counts == [len(plain.trainable_variables), 1]
    assert_close(plain.get_weights(), parallel.get_weights())
    assert_close(
        [v.numpy() for v in plain.own.variables], [v.numpy() for v in parallel.own.variables]
    )


def test_another_fit_tunes_again() -> None:
    """Not: starts with the first candidate and stays there."""
    model = compiled({"data": 2})
    callback = CommFusion(tune=True, candidates=TWO, steps=1)
    x, y = data(16)
    for _ in range(2):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
        fastest = min(callback.tried, key=callback.tried.__getitem__)
        assert str(attached(model).config.fusion) == fastest
        callback.tried = {"of the training before": 0.0}


class Stopping(keras.callbacks.Callback):
    """Ends `fit` by an error, after as many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise InterruptedError

    def get_state(self) -> int:
        return 0

    def set_state(self, state: int) -> None:
        """Each run stops, or not, as it was told."""


class Watching(CommFusion):
    """Notes the settings that the model had in each step."""

    def on_train_begin(self, logs: object = None) -> None:
        super().on_train_begin(logs)
        self.had: list[FusionConfig] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.had.append(attached(self.model).config.fusion)
        super().on_train_batch_end(batch, logs)


@pytest.mark.parametrize("stop", [3, 5], ids=["while_it_tries", "when_it_has_tried"])
def test_a_run_that_goes_on_tunes_again(stop: int, tmp_path: Path) -> None:
    """Not: names one candidate what another was timed as, or keeps the first whatever it found."""
    x, y = data(32)

    def fit(steps: int, level: int) -> tuple[keras.Model, Watching]:
        model, callback = compiled({"data": 2}, level), Watching(tune=True, candidates=TWO, steps=1)
        saver = kdist.callbacks.ShardedCheckpoint(tmp_path, every_steps=1, resume=True)
        with contextlib.suppress(InterruptedError):
            calls = [callback, saver, Stopping(steps)]
            model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=calls)
        return model, callback

    assert list(fit(stop, 1)[1].tried) == ([str(one) for one in TWO] if stop == 5 else [])
    model, callback = fit(-1, 0)
    assert callback.had[:4] == [TWO[0]] * 2 + [TWO[1]] * 2
    fastest = min(callback.tried, key=callback.tried.__getitem__)
    assert str(attached(model).config.fusion) == fastest


def test_training_too_short_to_tune_says_so() -> None:
    model = compiled({"data": 2})
    with pytest.warns(UserWarning, match="needs 20 steps to try 5 candidates"):
        model.fit(*data(8), verbose=0, callbacks=[CommFusion(tune=True)])


def test_tuning_changes_buckets_alone() -> None:
    """Not: refuses a model that says when buckets leave, or forgets what it says of messages."""
    own = FusionConfig(mode="index", index=(2,), overlap=False, algorithm="tree")
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), fusion=own)
    model = kdist.parallelize(mlp(), config)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    callback = CommFusion(tune=True, steps=1)
    callback.set_model(model)
    callback.on_train_begin()
    assert attached(model).config.fusion == own, "its own are tried too"
    tried = candidates_for(own)
    assert {(one.overlap, one.algorithm) for one in tried} == {(False, "tree")}
    assert [one.mode for one in tried] == ["index", "auto", "none", "size", "size", "size"]
    link = kdist.comm.LinkCost(a=1e-3, b=1e-9)
    found = candidates_for(FusionConfig(link=link))
    assert [one.link for one in found] == [link, None, None, None, None]


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(ValueError, match="plain Keras model"):
        compiled().fit(*data(8), verbose=0, callbacks=[CommFusion()])


@pytest.mark.parametrize("options", [{"steps": 0}, {"tune": True, "candidates": ()}])
def test_other_settings_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="Received: "):
        CommFusion(**options)


def test_set_fusion_keeps_state_on_an_inner_mesh(float64: None) -> None:
    plain, model = compiled(), compiled({"data": 2, "model": 2})
    x, y = data(16)
    for _ in range(2):
        assert_close(plain.train_on_batch(x, y), model.train_on_batch(x, y))
        attached(model).set_fusion(TWO[1])
    assert_close(plain.get_weights(), model.get_weights())
    assert np.ndim(model.optimizer.iterations.numpy()) == 0


def test_no_epoch_of_tuning_is_without_figures() -> None:
    model = compiled({"data": 4})
    x, y = data(16)
    tuning = CommFusion(tune=True, steps=1, candidates=TWO, verbose=0)
    found = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[tuning]).history
    assert {len(found[key]) for key in KEYS} == {3}
