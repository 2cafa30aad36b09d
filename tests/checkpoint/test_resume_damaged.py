"""A checkpoint is checked as it is read, once; `fit` goes on from the one before a damaged one."""

from __future__ import annotations

import kdist
from kdist.callbacks import ShardedCheckpoint
from kdist.checkpoint import directory as directories
from kdist.checkpoint import store
from kdist.checkpoint.manifest import STORE

import keras
import numpy as np
import pytest

from .runs import STEPS, build, bytes_read, run


def damage(folder):
    for file in (folder / STORE / "d").iterdir():
        file.write_bytes(file.read_bytes()[:40])


def wide():
    """Kernels that are large beside what else a checkpoint has to say."""
    layers = [keras.layers.Dense(256, name=f"wide{n}") for n in range(3)]
    model = keras.Sequential([keras.Input((256,)), *layers], name="wide")
    optimizer = kdist.OptimizerConfig(level=3, threshold_kb=0)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=optimizer))
    model.compile("adam", "mse")
    return model


def test_what_is_read_is_what_is_loaded(tmp_path):
    x = np.ones((16, 256))
    wide().fit(
        x, x, batch_size=4, verbose=0, callbacks=[ShardedCheckpoint(tmp_path, every_steps=3)]
    )
    *_, folder = directories.folders(tmp_path)
    saver = ShardedCheckpoint(tmp_path, resume=True)
    before = bytes_read()
    wide().fit(x, x, batch_size=4, verbose=0, callbacks=[saver])
    read = bytes_read() - before
    assert saver.restored.step == 4
    arrays = sum(
        array.elements * store.dtype_of(array.dtype).itemsize
        for _, array in directories.load(folder).arrays
    )
    assert arrays < read < 1.05 * arrays


@pytest.mark.filterwarnings("ignore:A generator")
@pytest.mark.parametrize(
    ("kind", "stop", "bad"),
    [("arrays", STEPS + 4, 1), ("dataset", 2 * STEPS + 1, 2), ("generator", STEPS + 4, 1)],
)
def test_the_one_before_is_taken(tmp_path, kind, stop, bad):
    """Within an epoch, and at its end; several bad ones; data that is given once."""
    whole = run(build({"data": 2}, 1), ShardedCheckpoint(tmp_path / "whole", every_steps=3), kind)
    saver = ShardedCheckpoint(tmp_path, every_steps=3)
    run(build({"data": 2}, 1), saver, kind, stop)
    *_, good = directories.folders(tmp_path)[:-bad]
    for folder in directories.folders(tmp_path)[-bad:]:
        damage(folder)
    saver = ShardedCheckpoint(tmp_path, every_steps=3, resume=True)
    with pytest.warns(UserWarning, match="cannot be read.*before it is taken"):
        found = run(build({"data": 2}, 1), saver, kind)
    assert saver.restored.folder == good
    assert found["history"] == whole["history"]
    assert found["steps"] == whole["steps"]
    for a, b in zip(found["weights"], whole["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_another_it_is_an_error(tmp_path):
    run(build({"data": 2}, 1), ShardedCheckpoint(tmp_path, every_steps=3), "arrays", stop=4)
    damage(*directories.folders(tmp_path))
    with pytest.raises(kdist.checkpoint.CheckpointError, match="cannot be read"):
        run(build({"data": 2}, 1), ShardedCheckpoint(tmp_path, resume=True), "arrays")
