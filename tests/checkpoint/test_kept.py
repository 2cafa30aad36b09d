"""Which checkpoints stay: the newest by number, and the best by what is monitored."""

from __future__ import annotations

import math
import time
import warnings

import kdist
from kdist.callbacks import ShardedCheckpoint, sharded_checkpoint
from kdist.checkpoint import directory as directories
from kdist.checkpoint.manifest import CheckpointError
from kdist.checkpoint.monitored import Monitored
from kdist.checkpoint.writer import write

import keras
import numpy as np
import pytest

from .runs import STEPS, build, run


def steps_in(directory):
    return [directories.step_of(one) for one in directories.folders(directory)]


def test_a_second_run_counts_on_from_the_newest_checkpoint(tmp_path):
    """Its state is the newest there, and `keep` leaves it."""
    model = build({"data": 2}, 0)
    saver = ShardedCheckpoint(tmp_path, every_steps=2, keep=2)
    run(model, saver, "arrays", epochs=2)
    assert steps_in(tmp_path) == [2 * STEPS - 2, 2 * STEPS]
    run(model, saver, "arrays", epochs=1)
    assert steps_in(tmp_path) == [3 * STEPS - 2, 3 * STEPS]
    other = build({"data": 2}, 0)
    assert kdist.checkpoint.restore(other, tmp_path).step == 3 * STEPS
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_resumes_a_second_run_goes_on_with_its_numbers(tmp_path):
    """Of a model that had trained elsewhere, too: its optimizer has counted."""
    model = build({"data": 2}, 0)
    model.fit(np.ones((8, 6)), np.ones((8, 3)), epochs=4, verbose=0)
    run(model, ShardedCheckpoint(tmp_path, every_steps=3), "arrays", stop=8)
    assert steps_in(tmp_path) == [4 + 3, 4 + 6]
    saver = ShardedCheckpoint(tmp_path, every_steps=3, keep=None, resume=True)
    again = build({"data": 2}, 0)
    run(again, saver, "arrays", epochs=2)
    assert saver.restored.step == 4 + 6
    assert steps_in(tmp_path) == [4 + 3, 4 + 6, 4 + 9, 4 + 12]
    assert int(again.optimizer.iterations) == 4 + 12


def test_the_best_of_an_epochs_value_is_found_between_steps_too(tmp_path):
    model = build({"data": 2}, 0)
    saver = ShardedCheckpoint(tmp_path, every_steps=4, keep=1, monitor="val_loss", mode="max")
    values = run(model, saver, "split")["history"]["val_loss"]
    per_epoch = 5  # 35 rows are not held out
    assert saver.best == max(values)
    best = per_epoch * (1 + int(np.argmax(values)))
    assert steps_in(tmp_path) == sorted({best, 3 * per_epoch})
    again = ShardedCheckpoint(tmp_path, monitor="val_loss", mode="max", resume=True)
    run(build({"data": 2}, 0), again, "split")
    assert again.best == max(values)


def test_the_best_that_is_still_being_written_stays(tmp_path, monkeypatch):
    def late(*args):
        time.sleep(0.2)
        return write(*args)

    monkeypatch.setattr(sharded_checkpoint, "write", late)
    saver = ShardedCheckpoint(tmp_path, every_steps=1, keep=1, monitor="loss", mode="max")
    run(build({"data": 2}, 0), saver, "arrays", epochs=1)
    assert steps_in(tmp_path) == sorted({saver._monitored.best[0], STEPS}) and STEPS > 1
    assert saver._monitored.best[0] < STEPS


@pytest.mark.parametrize(("mode", "best"), [("min", 1.0), ("max", 3.0)])
def test_what_is_no_number_is_never_the_best(mode, best):
    monitored = Monitored("val_loss", mode)
    for step, value in enumerate([math.nan, 3.0, 1.0, math.nan, 2.0]):
        monitored.judge(step, {"val_loss": value})
    assert monitored.best[1] == best
    monitored.begin((0, math.nan))  # as an earlier version could save it
    monitored.judge(7, {"val_loss": 5.0})
    assert monitored.best == (7, 5.0)


@pytest.mark.parametrize(
    ("monitor", "kind", "told"),
    [("val_lossy", "split", 1), ("val_loss", "arrays", 1), ("val_loss", "split", 0)],
)
def test_a_name_that_no_logs_have_is_told_once(tmp_path, monitor, kind, told):
    saver = ShardedCheckpoint(tmp_path, monitor=monitor)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(build({"data": 2}, 0), saver, kind)
    texts = [str(one.message) for one in found if "monitors" in str(one.message)]
    assert len(texts) == told
    assert all(f"monitor={monitor!r}" in text and "'loss'" in text for text in texts)


def test_a_model_does_not_replace_a_checkpoint_of_another(tmp_path):
    """As the two of a GAN would, of the same step in one directory; of other steps they may be."""
    model, other = build({"data": 2}, 0), keras.Sequential([keras.Input((2,))])
    other.add(keras.layers.Dense(3))
    folder = kdist.checkpoint.save(model, tmp_path, step=1)
    with pytest.raises(CheckpointError, match="of another model.*Received: model="):
        kdist.checkpoint.save(other, tmp_path, step=1)
    assert steps_in(tmp_path) == [1] and kdist.checkpoint.latest(tmp_path) == folder
    kdist.checkpoint.save(other, tmp_path, step=2)
    (folder / directories.MANIFEST).write_text("damaged")
    kdist.checkpoint.save(other, tmp_path, step=1)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("name", ["a\\b", "a\\"])
def test_a_backslash_in_a_path_is_refused(tmp_path, name):
    """TensorStore takes it for a slash, and would write into another folder."""
    with pytest.raises(ValueError, match=r"(?s)backslash.*Received: directory="):
        ShardedCheckpoint(tmp_path / name / "deeper")
    with pytest.raises(ValueError, match=r"(?s)backslash.*Received: directory="):
        kdist.checkpoint.save(build({"data": 2}, 0), tmp_path / name)
    assert not list(tmp_path.iterdir())


def two_columns(built):
    """Another model than `build` makes."""
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((6,))] * built
    model = keras.Sequential([*inputs, keras.layers.Dense(2), keras.layers.Dense(3)])
    model = kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("built", [True, False])
def test_a_run_of_another_model_is_refused(tmp_path, built):
    """Its `keep` would remove the checkpoints of the first, and neither could resume."""
    run(build({"data": 2}, 0), ShardedCheckpoint(tmp_path), "arrays", epochs=1)
    there, other = steps_in(tmp_path), two_columns(built)
    with pytest.raises(CheckpointError, match="(?s)of another model.*directory of its own"):
        other.fit(np.ones((8, 6)), np.ones((8, 3)), callbacks=[ShardedCheckpoint(tmp_path)])
    assert steps_in(tmp_path) == there
    assert int(other.optimizer.iterations) == 0 or not built


def test_a_step_is_any_whole_number(tmp_path):
    """NumPy's too, which optimizers count with."""
    model = build({"data": 2}, 0)
    for n, step in enumerate((np.int64(1), model.optimizer.iterations.numpy() + 2)):
        folder = kdist.checkpoint.save(model, tmp_path, step=step)
        assert kdist.checkpoint.latest(tmp_path) == folder and directories.step_of(folder) == n + 1
    for step in (-1, 2.5, True, "3"):
        with pytest.raises(ValueError, match=r"step is the number.*Received: step="):
            kdist.checkpoint.save(model, tmp_path, step=step)
    assert len(list(tmp_path.iterdir())) == 2
