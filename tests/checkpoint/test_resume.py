"""`fit` goes on in the middle of an epoch, and ends as one that never stopped, to the bit."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import kdist
from kdist._compat import keras_places
from kdist.callbacks import ShardedCheckpoint
from kdist.checkpoint import directory as directories
from kdist.checkpoint.callback_state import CallbackStates
from kdist.checkpoint.keras_description import KnownPlaces
from kdist.checkpoint.snapshot import snapshot
from kdist.storage.variables import parts_of

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..equivalence.matrix import product, spread
from .runs import STEPS, arrays, build, run

MESHES = {"data2": {"data": 2}, "data2_model2": {"data": 2, "model": 2}}
KINDS = (
    "arrays",
    "weighted",
    "split",
    "endless",
    "sparse",
    "sparse_split",
    "cut",
    "batches",
    "workers",
    "dataset",
    "classes",
    "unknown",
    "python",
    "repeated",
    "generator",
)
STOPS = (4, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS + 3)
DEFAULT = [
    ("arrays", 10, "data2_model2"),
    ("batches", 4, "data2"),
    ("dataset", 7, "data2"),
    ("classes", 7, "data2"),
    ("unknown", 7, "data2"),
    ("generator", 4, "data2"),
    ("sparse_split", 7, "data2"),
    ("cut", 10, "data2"),
]


@functools.cache
def unbroken(kind: str, mesh: str):
    return run(build(MESHES[mesh], 1), ShardedCheckpoint(tempfile.mkdtemp(), every_steps=3), kind)


@pytest.mark.filterwarnings("ignore:.*shuffle=True", "ignore:A generator", "ignore:The position")
@pytest.mark.filterwarnings("ignore:Your input ran out")
@pytest.mark.parametrize(
    ("kind", "stop", "mesh"), spread(sorted({*product(KINDS, STOPS, MESHES), *DEFAULT}), DEFAULT)
)
def test_a_run_that_stopped_ends_as_one_that_did_not(tmp_path, kind, stop, mesh):
    whole = unbroken(kind, mesh)
    first = run(build(MESHES[mesh], 1), ShardedCheckpoint(tmp_path, every_steps=3), kind, stop)
    saver = ShardedCheckpoint(tmp_path, every_steps=3, resume=True)
    second = run(build(MESHES[mesh], 1), saver, kind)
    done = saver.restored.step if saver.restored else 0
    assert stop - 3 <= done < stop
    assert first["steps"] == whole["steps"][:stop]
    assert second["steps"] == whole["steps"]  # the callback's state, and what came after
    assert second["epochs"] == whole["epochs"]
    assert list(second["history"].items()) == list(whole["history"].items())  # their order too
    for a, b in zip(second["weights"], whole["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_on_another_mesh_and_with_several_steps_per_call(tmp_path):
    """Without dropout and statistics, which replicas do not have in common."""

    def model(mesh, level, **options):
        keras.utils.set_random_seed(4)
        inputs = keras.Input((6,))
        x = keras.layers.Dense(8, activation="tanh", name="up")(inputs)
        one = keras.Model(inputs, keras.layers.Dense(3, name="head")(x))
        optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
        kdist.parallelize(one, kdist.ParallelConfig(mesh=kdist.mesh(**mesh), optimizer=optimizer))
        one.compile(keras.optimizers.SGD(0.1, 0.9), "mse", metrics=["mae"], **options)
        return one

    whole = run(model({"data": 2}, 0), ShardedCheckpoint(tmp_path / "a"), "arrays")
    part = ShardedCheckpoint(tmp_path / "b", every_steps=2, keep=None)
    run(model({"data": 4}, 3), part, "arrays", stop=STEPS + 3)
    saver = ShardedCheckpoint(tmp_path / "b", resume=True)
    rest = run(model({"data": 2}, 1, steps_per_execution=2), saver, "arrays")
    assert saver.restored.step == STEPS + 2
    for name, values in whole["history"].items():
        np.testing.assert_allclose(rest["history"][name], values, rtol=1e-5)
    other = model({"data": 2}, 0, steps_per_execution=3)
    for one in directories.folders(tmp_path / "b"):
        if directories.step_of(one) > STEPS + 2:
            directories.remove(one)
    with pytest.raises(kdist.checkpoint.CheckpointError, match="steps_per_execution"):
        run(other, ShardedCheckpoint(tmp_path / "b", resume=True), "arrays")


def test_a_run_that_ended_is_not_run_again(tmp_path):
    model = build({"data": 2}, 0)
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100)
    whole = run(model, ShardedCheckpoint(tmp_path), "arrays", epochs=5, also=[stopping])
    assert len(whole["epochs"]) == 2
    again = build({"data": 2}, 0)
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100)
    saver = ShardedCheckpoint(tmp_path, resume=True)
    second = run(again, saver, "arrays", epochs=5, also=[stopping])
    assert second["steps"] == whole["steps"]
    assert list(second["history"].items()) == list(whole["history"].items())  # their order too
    for a, b in zip(second["weights"], whole["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_epoch_to_begin_with_that_is_left_out_is_told(tmp_path):
    """The checkpoint's is where a run goes on; the first one's own is given again as it was."""
    model = build({"data": 2}, 0)
    for initial, text in ((1, None), (1, None), (4, "initial_epoch=4; the checkpoint is of 2")):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            saver = ShardedCheckpoint(tmp_path, resume=True)
            epochs = 2 if initial == 1 else 3
            found = model.fit(
                *arrays(),
                initial_epoch=initial,
                epochs=epochs,
                verbose=0,
                callbacks=[saver],
            )
        said = [str(one.message) for one in told if "initial_epoch" in str(one.message)]
        assert len(said) == (text is not None) and all(text in one for one in said)
    assert found.epoch == [1, 2]


def test_a_model_is_described_once(tmp_path, monkeypatch):
    """What training waits for is the copy; a model that changes is described again."""
    found = []
    own = keras_places.places
    monkeypatch.setattr(keras_places, "places", lambda model: found.append(1) or own(model))
    model = build({"data": 2}, 1)
    for n, edit in enumerate((lambda: None, lambda: model.get_layer("up").enable_lora(2))):
        edit()
        model.compile("adam", "mse", metrics=["mae"])
        run(model, ShardedCheckpoint(tmp_path / str(n), every_steps=2, keep=None), "arrays")
        assert len(directories.folders(tmp_path / str(n))) == 3 * STEPS // 2
        assert len(found) == n + 1
    known = KnownPlaces()
    for expected in (3, 3, 4):
        if expected == 4:
            model.get_layer("head").enable_lora(2)
        snapshot(model, 0, known=known)
        assert len(found) == expected


def test_a_snapshot_stays_while_training_goes_on():
    model = build({"data": 2}, 1)
    x, y = arrays()
    model.train_on_batch(x[:8], y[:8])
    parts = snapshot(model, 0).parts
    kept = [values.copy() for _, values in parts]
    for values in (values for _, values in parts):
        for variable in model.weights:
            for part in parts_of(variable):
                held = getattr(part.target, "flat", part.target)
                assert not np.shares_memory(values, np.asarray(tf.convert_to_tensor(held.value)))
    model.train_on_batch(x[:8], y[:8])
    for (_, values), before in zip(parts, kept, strict=True):
        np.testing.assert_array_equal(values, before)


def test_which_checkpoints_stay(tmp_path):
    saver = ShardedCheckpoint(tmp_path, every_steps=2, keep=2, monitor="loss", mode="max")
    run(build({"data": 2}, 0), saver, "arrays")
    steps = [directories.step_of(one) for one in directories.folders(tmp_path)]
    assert steps == [2, 16, 18]  # the first has the largest loss


def events(folder):
    """Scalars that TensorBoard shows: file by file, (tag, step) -> value."""
    found = []
    for file in sorted(folder.glob("*/events*"), key=lambda one: one.stat().st_mtime_ns):
        scalars = {}
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" or value.tag.startswith("b"):
                    name = f"{file.parent.name}/{value.tag}"
                    scalars[name, event.step] = float(tf.make_ndarray(value.tensor))
        found.append(scalars)
    return found


def merged(files):
    return {key: value for one in files for key, value in one.items()}


@pytest.mark.parametrize("kind", ["split", pytest.param("arrays", marks=pytest.mark.long)])
def test_tensorboard_goes_on(tmp_path, kind):
    """Its steps are those of an unbroken run; what is of the process only is not taken along."""

    def one(name, stop=None, epochs=3, **options):
        board = keras.callbacks.TensorBoard(
            tmp_path / f"{name}_logs", update_freq=1, write_steps_per_second=True, **options
        )
        saver = ShardedCheckpoint(tmp_path / name, every_steps=3, resume=True)
        run(build({"data": 2}, 1), saver, kind, stop, epochs, also=[board])
        return board, saver

    whole, _ = one("whole")
    one("broken", stop=STEPS + 2)
    board, saver = one("broken")
    done = saver.restored.step
    assert board._global_train_batch == whole._global_train_batch
    assert board._global_test_batch == whole._global_test_batch
    expected, files = merged(events(tmp_path / "whole_logs")), events(tmp_path / "broken_logs")
    found = merged(files)
    assert found.keys() == expected.keys() and ("train/batch_loss", 1) in found
    runs = [{step for tag, step in one if tag == "train/batch_loss"} for one in files]
    assert [min(steps) for steps in runs if steps] == [1, done + 1]
    for key, value in expected.items():
        if "steps_per_second" in key[0]:
            assert 0 < found[key] < 1e4
        else:
            assert found[key] == value, key


def test_a_profile_that_was_running_does_not_go_on(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    states = CallbackStates([board])
    board._global_train_batch, board._is_tracing, board._profiler_started = 5, True, True
    (saved,) = states.save([])
    assert saved["changed"] == {"_global_train_batch": 5}


class Holds(keras.callbacks.Callback):
    """Holds what no file can."""

    def __init__(self):
        super().__init__()
        self.seen, self.socket = 0, object()

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1


def test_a_callback_whose_state_cannot_be_saved_is_named_once(tmp_path):
    saver = ShardedCheckpoint(tmp_path, every_steps=2)
    with pytest.warns(UserWarning, match="Holds holds what") as told:
        run(build({"data": 2}, 0), saver, "arrays", also=[Holds()])
    (one,) = (str(w.message) for w in told if "Holds" in str(w.message))
    assert "['socket']" in one and "get_state() and set_state(state)" in one
    again = Holds()
    with pytest.warns(UserWarning, match="Holds holds what"):
        saver = ShardedCheckpoint(tmp_path, every_steps=2, resume=True)
        run(build({"data": 2}, 0), saver, "arrays", epochs=4, also=[again])
    assert again.seen == 4 * STEPS


def test_arrays_that_are_no_numbers_are_named():
    holds = Holds()
    states = CallbackStates([holds])
    del holds.socket
    holds.names, holds.best = np.array(["a", "bb"]), np.str_("q")
    holds.when, holds.text = np.datetime64("2020-01-01"), tf.constant("t")
    holds.pairs = np.zeros(2, "i4,i4")
    holds.half, holds.sign = tf.constant([1, 2], tf.bfloat16), np.complex64(1j)
    arrays: list[np.ndarray] = []
    with pytest.warns(UserWarning, match="Holds holds what") as told:
        (saved,) = states.save(arrays)
    assert "['names', 'when', 'text', 'pairs']" in str(told[0].message)
    assert saved["changed"] == {"best": "q", "half": {"array": 0}, "sign": {"array": 1}}
    assert [one.dtype.name for one in arrays] == ["bfloat16", "complex64"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_steps": 0}, "every_steps is a number"),
        ({"every_steps": 2.5}, "every_steps is a number"),
        ({"every_steps": "x"}, "every_steps is a number"),
        ({"monitor": "val_loss", "mode": "MAX"}, "mode is"),
        ({"monitor": "entropy"}, "mode says whether"),
        ({"keep": -1}, "keep is a number"),
        ({"compression": "gzip"}, "compression is"),
    ],
)
def test_values_without_a_meaning_are_refused(tmp_path, options, text):
    with pytest.raises(ValueError, match=f"{text}.*Received: "):
        ShardedCheckpoint(tmp_path, **options)


def test_a_plain_model_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"kdist\.parallelize"):
        model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=[ShardedCheckpoint(tmp_path)])


def test_a_generator_that_ends_early_is_refused(tmp_path):
    run(build({"data": 2}, 0), ShardedCheckpoint(tmp_path, every_steps=3), "generator", stop=8)
    model = build({"data": 2}, 0)
    short = ((np.ones((8, 6)), np.ones((8, 3))) for _ in range(3))
    with (
        pytest.raises(kdist.checkpoint.CheckpointError, match="ended before"),
        pytest.warns(UserWarning, match="A generator"),
    ):
        saver = ShardedCheckpoint(tmp_path, resume=True)
        model.fit(short, epochs=3, steps_per_epoch=STEPS, verbose=0, callbacks=[saver])


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
    saver = ShardedCheckpoint(tmp_path / "file" / "checkpoints")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        run(build({"data": 2}, 0), saver, "arrays")


SCRIPT = """
import json, sys, time
sys.path.insert(0, {checkout!r})
import kdist
import keras
kdist.init(cpu_devices=4)
from tests.checkpoint.runs import StopAfter, build, run

class Slow(StopAfter):
    def on_train_batch_end(self, batch, logs=None):
        print("step", flush=True)
        time.sleep(0.2)

saver = kdist.callbacks.ShardedCheckpoint({directory!r}, every_steps=2, resume=True)
found = run(build({{"data": 2}}, 1), saver, "arrays", epochs=40, also=[Slow(0)])
print(json.dumps([found["history"], [float(w.sum()) for w in found["weights"]]]))
"""


@pytest.mark.long
def test_twenty_kills_of_training(tmp_path):
    """At moments that chance picks: one in five as the process starts, the others in training."""
    checkout, directory = str(Path(__file__).resolve().parents[2]), tmp_path / "killed"

    def start(directory):
        code = SCRIPT.format(checkout=checkout, directory=str(directory))
        environment = {**os.environ, "PYTHONPATH": checkout}
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("w"),
            text=True,
            env=environment,
        )

    def finished(process):
        said = process.communicate()[0]
        why = (tmp_path / "stderr").read_text()
        assert process.returncode == 0, (process.returncode, why)
        return said.splitlines()[-1]

    whole = finished(start(tmp_path / "whole"))
    draw, steps = random.Random(1), []
    for n in range(20):
        process = start(directory)
        if n % 5 < 4:
            assert process.stdout.readline() == "step\n", (tmp_path / "stderr").read_text()
        time.sleep(draw.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        newest = kdist.checkpoint.latest(directory)
        steps.append(0 if newest is None else directories.step_of(newest))
    assert steps == sorted(steps) and len(set(steps)) > 5, steps
    assert finished(start(directory)) == whole
