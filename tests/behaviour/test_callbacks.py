"""Keras's own callbacks see and change a parallel model as they do a plain one."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ..parity import (
    NAMES,
    assert_close,
    assert_every_copy,
    assert_same_history,
    assert_same_weights,
    data,
    everywhere,
    in_float64,
    mlp,
)

pytestmark = pytest.mark.usefixtures("float64")

Models = tuple[keras.Model, ...]


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Models, list[list[np.ndarray]]]]:
    """Models that are compiled and traced once for many tests, with what they begin with."""
    with in_float64():
        found = everywhere()
        for model in found:
            model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
            model.optimizer.build(model.trainable_variables)
        yield found, [[np.array(v.numpy()) for v in _variables(model)] for model in found]


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.weights, *model.optimizer.variables]


@pytest.fixture
def models(traced: Any) -> Models:
    """Models as they begin; to compile another way, take `fresh` ones."""
    found, begins = traced
    for model, begin in zip(found, begins, strict=True):
        for variable, value in zip(_variables(model), begin, strict=True):
            variable.assign(value)
        model.stop_training = False
    return found


@pytest.fixture
def fresh() -> Models:
    found = everywhere()
    for model in found:
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return found


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> Any:
    settings = {"batch_size": 8, "shuffle": False, "epochs": 3, "verbose": 0, **options}
    return model.fit(
        *data(), validation_data=data(8, seed=3), callbacks=list(callbacks), **settings
    )


def fit_all(models: Models, make: Any, **options: Any) -> list[Any]:
    """Trains each with callbacks of its own from `make(name)`; compares everything."""
    histories = []
    for name, model in zip(NAMES, models):
        callbacks = make(name)
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        histories.append(fit(model, *callbacks, **options))
    assert_same_history(*histories)
    assert_same_weights(*models)
    return histories


def check_copies(models: Models) -> None:
    for model in models[1:]:
        for variable in model.weights:
            assert_every_copy(variable, variable.numpy())


def test_checkpoint_of_the_best_weights(models, tmp_path):
    def make(name: str) -> Any:
        return keras.callbacks.ModelCheckpoint(
            tmp_path / f"{name}.weights.h5", save_weights_only=True, save_best_only=True
        )

    fit_all(models, make)
    for name, model in zip(NAMES, models):
        model.load_weights(tmp_path / f"{name}.weights.h5")
    assert_close(*[m.get_weights() for m in models])
    for name in NAMES:
        crossed = mlp()
        crossed.load_weights(tmp_path / f"{name}.weights.h5")
        assert_close(models[0].get_weights(), crossed.get_weights())


def test_checkpoint_of_the_full_model(fresh, tmp_path):
    def make(name: str) -> Any:
        return keras.callbacks.ModelCheckpoint(str(tmp_path / (name + "-{epoch}.keras")))

    fit_all(fresh, make)
    for epoch in (1, 3):
        loaded = [keras.models.load_model(tmp_path / f"{n}-{epoch}.keras") for n in NAMES]
        assert_same_weights(*loaded)
    again = [fit(model) for model in loaded]
    assert_same_history(*again)


def test_checkpoints_inside_an_epoch(models, tmp_path):
    def make(name: str) -> Any:
        return keras.callbacks.ModelCheckpoint(
            str(tmp_path / (name + "-{batch}.weights.h5")), save_weights_only=True, save_freq=2
        )

    fit_all(models, make, epochs=1)
    found = [sorted(p.name.split("-")[1] for p in tmp_path.glob(f"{name}-*")) for name in NAMES]
    assert found[0]
    assert found[0] == found[1] == found[2]
    fresh = [mlp() for _ in NAMES]
    for name, model in zip(NAMES, fresh):
        model.load_weights(tmp_path / f"{name}-{found[0][0]}")
    assert_close(*[m.get_weights() for m in fresh])


def test_early_stopping_restores_every_copy(models):
    def make(name: str) -> Any:
        return keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=2, restore_best_weights=True
        )

    histories = fit_all(models, make, epochs=8)
    assert [len(h.epoch) for h in histories] == [len(histories[0].epoch)] * 3
    assert len(histories[0].epoch) < 8
    check_copies(models)


def test_reduce_learning_rate_on_plateau(models):
    def make(name: str) -> Any:
        return keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=100, patience=1, factor=0.1)

    fit_all(models, make, epochs=4)
    rates = [float(m.optimizer.learning_rate) for m in models]
    assert rates[0] == rates[1] == rates[2] < 0.05


def test_learning_rate_scheduler(models):
    def make(name: str) -> Any:
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)

    histories = fit_all(models, make)
    for history in histories:
        np.testing.assert_allclose(history.history["learning_rate"], [0.025, 0.0125, 0.00625])


def test_csv_logger(models, tmp_path):
    fit_all(models, lambda name: keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"))
    tables = []
    for name in NAMES:
        with open(tmp_path / f"{name}.csv", newline="") as file:
            tables.append(list(csv.DictReader(file)))
    assert [list(row) for row in tables[0]] == [list(row) for row in tables[1]]
    assert [list(row) for row in tables[0]] == [list(row) for row in tables[2]]
    for rows in zip(*tables, strict=True):
        assert_close(*[[float(v) for v in row.values()] for row in rows])


def test_tensor_board(models, tmp_path):
    def make(name: str) -> Any:
        return keras.callbacks.TensorBoard(
            tmp_path / name, histogram_freq=1, write_graph=True, update_freq="batch"
        )

    fit_all(models, make)
    written = [sorted(p.parent.name for p in (tmp_path / name).rglob("events*")) for name in NAMES]
    assert written[0] == written[1] == written[2]
    assert set(written[0]) >= {"train", "validation"}


def test_terminate_on_nan(models):
    x, y = data()
    y[9] = np.nan
    epochs = []
    for model in models:
        history = model.fit(
            x,
            y,
            batch_size=8,
            shuffle=False,
            epochs=3,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )
        epochs.append(len(history.epoch))
    assert epochs[0] == epochs[1] == epochs[2]


class Crash(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptedError


def test_backup_and_restore(fresh, tmp_path):
    """Killed in epoch 3 and resumed in a new model, a run ends where an unbroken one does."""
    unbroken, *broken = fresh
    expected = fit(unbroken, epochs=4)
    for name, model in zip(NAMES[1:], broken):
        backup = keras.callbacks.BackupAndRestore(tmp_path / name)
        with pytest.raises(InterruptedError):
            fit(model, backup, Crash(), epochs=4)
        model.set_weights([w * 0 for w in model.get_weights()])
        history = fit(model, keras.callbacks.BackupAndRestore(tmp_path / name), epochs=4)
        assert history.epoch == [2, 3]
        for metric in expected.history:
            assert_close(expected.history[metric][2:], history.history[metric])
    assert_same_weights(*fresh)


class Rewrite(keras.callbacks.Callback):
    """Doubles all weights after batch 1, as a user's pruning or averaging callback may."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.set_weights([w * 2 for w in self.model.get_weights()])


@pytest.mark.parametrize("eager", [False, True])
def test_set_weights_inside_an_epoch(fresh, eager):
    for model in fresh:
        model.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=eager)
    fit_all(fresh, lambda name: Rewrite(), epochs=2)
    check_copies(fresh)


def test_set_weights_inside_an_epoch_reaches_whole_copies(fresh):
    """Lamb keeps a whole copy of each cut weight: it must not overwrite what was set."""
    for model in fresh:
        model.compile(keras.optimizers.Lamb(0.05), "mse")
    fit_all(fresh, lambda name: Rewrite(), epochs=2)


def test_optimizer_changed_inside_an_epoch(models):
    """A callback that resets optimizer state, and one that sets the learning rate mid-epoch."""

    class Reset(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.optimizer.learning_rate = 0.2
                for variable in self.model.optimizer.variables:
                    if "momentum" in variable.path:
                        variable.assign(variable * 0)

    fit_all(models, lambda name: Reset())


def test_swap_ema_weights(fresh, tmp_path: Path):
    for model in fresh:
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
    fit_all(fresh, lambda name: keras.callbacks.SwapEMAWeights(swap_on_epoch=True))


def test_batch_logs_are_the_same(models):
    seen: dict[str, list] = {name: [] for name in NAMES}

    def make(name: str) -> Any:
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen[name].append((batch, dict(logs)))
        )

    fit_all(models, make)
    for name in NAMES[1:]:
        assert [b for b, _ in seen["plain"]] == [b for b, _ in seen[name]]
    assert_close(*[[logs for _, logs in seen[name]] for name in NAMES])


def test_stop_training_inside_an_epoch(models):
    def make(name: str) -> Any:
        def stop(batch: int, logs: Any) -> None:
            callback.model.stop_training = batch == 1

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        return callback

    histories = fit_all(models, make)
    assert len({len(history.epoch) for history in histories}) == 1
