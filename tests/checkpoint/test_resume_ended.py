"""A run that has no epoch left to train ends with the state of its checkpoint."""

from __future__ import annotations

from kdist.callbacks import ShardedCheckpoint
from kdist.checkpoint import directory as directories

import keras
import numpy as np
import pytest

from ..cluster.stopping import Stopped
from .runs import STEPS, build, run, source


def test_the_end_of_training_is_saved_whatever_the_step(tmp_path):
    """Not only every few steps: the next run has nothing left to train."""
    every = STEPS - 1
    assert 3 * STEPS % every
    whole = run(build({"data": 2}, 1), ShardedCheckpoint(tmp_path, every_steps=every), "arrays")
    newest = directories.folders(tmp_path)[-1]
    assert directories.step_of(newest) == 3 * STEPS
    saver = ShardedCheckpoint(tmp_path, every_steps=every, resume=True)
    again = build({"data": 2}, 1)
    second = run(again, saver, "arrays")
    assert int(again.optimizer.iterations) == 3 * STEPS
    assert second["history"] == whole["history"]


class StopAtTheEnd(keras.callbacks.Callback):
    """Stops training as its second epoch ends, as `EarlyStopping` does."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


@pytest.mark.parametrize("first", [True, False])
def test_so_is_the_end_of_a_run_that_another_callback_stops(tmp_path, first):
    model, rows = build({"data": 2}, 1), source("arrays")
    calls = [ShardedCheckpoint(tmp_path, every_steps=STEPS - 1), StopAtTheEnd()]
    model.fit(**rows, epochs=5, verbose=0, callbacks=calls if first else calls[::-1])
    newest = directories.folders(tmp_path)[-1]
    assert directories.step_of(newest) == int(model.optimizer.iterations) == 2 * STEPS
    again = build({"data": 2}, 1)
    saver = ShardedCheckpoint(tmp_path, every_steps=STEPS - 1, resume=True)
    again.fit(**rows, epochs=5, verbose=0, callbacks=[saver])
    assert int(again.optimizer.iterations) == 2 * STEPS


class Diverges(keras.callbacks.Callback):
    """Has a weight that is no number from a step on."""

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == STEPS + 2:
            weight = self.model.weights[0]
            weight.assign(weight * np.nan)


def test_the_end_of_a_run_that_diverged_takes_no_checkpoint_away(tmp_path):
    model, rows = build({"data": 2}, 1), source("arrays")
    stop = [Diverges(), keras.callbacks.TerminateOnNaN()]
    saver = ShardedCheckpoint(tmp_path, every_steps=STEPS + 1, keep=1)
    model.fit(**rows, epochs=3, verbose=0, callbacks=[*stop, saver])
    assert np.isnan(model.get_weights()[0]).any()
    assert [directories.step_of(one) for one in directories.folders(tmp_path)] == [STEPS + 1]


class StopWithin(keras.callbacks.Callback):
    """Stops training within an epoch, as `TerminateOnNaN` does."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            self.model.stop_training = True


class DieAtTheEnd(keras.callbacks.Callback):
    """Ends a run as a crash would, as its second epoch ends."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise Stopped


def test_a_run_that_was_stopped_within_an_epoch_is_not_run_again(tmp_path):
    """Nor is its model left as it was built."""
    stop = [StopWithin(STEPS + 4)]
    whole = run(
        build({"data": 2}, 1), ShardedCheckpoint(tmp_path, every_steps=2), "arrays", also=stop
    )
    assert len(whole["epochs"]) == 2
    saver = ShardedCheckpoint(tmp_path, every_steps=2, resume=True)
    second = run(build({"data": 2}, 1), saver, "arrays", also=[StopWithin(STEPS + 4)])
    assert second["steps"] == whole["steps"] and second["history"] == whole["history"]
    for a, b in zip(second["weights"], whole["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_of_a_checkpoint_within_an_epoch_that_is_not_trained_the_state_is_loaded(tmp_path):
    """One of a run that was killed as it stopped; and one of a later epoch than `epochs`."""
    stopped, later = tmp_path / "stopped", tmp_path / "later"
    also = [StopWithin(STEPS + 4), DieAtTheEnd()]
    run(build({"data": 2}, 1), ShardedCheckpoint(stopped, every_steps=2), "arrays", also=also)
    run(build({"data": 2}, 1), ShardedCheckpoint(later, every_steps=2), "arrays", STEPS + 5)
    for folder, epochs in ((stopped, 3), (later, 1)):
        again = build({"data": 2}, 1)
        saver = ShardedCheckpoint(folder, every_steps=2, resume=True)
        found = run(again, saver, "arrays", epochs=epochs)
        assert int(again.optimizer.iterations) == saver.restored.step > STEPS
        assert len(found["epochs"]) == 1  # those that have ended
