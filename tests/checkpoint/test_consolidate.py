"""Files of Keras, and of others, out of a checkpoint, without the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kdist
from kdist.checkpoint.__main__ import main
from kdist.checkpoint.manifest import STORE

import h5py
import keras
import numpy as np
import pytest

from .kinds import KINDS, build, data, state, train

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model whose weights and moments are cut in four, and its checkpoint."""
    directory = tmp_path_factory.mktemp("checkpoints")
    model = KINDS["data2-model2-level3"].model()
    train(model, 1)
    kdist.checkpoint.save(model, directory)
    return model, directory


def test_a_keras_file_loads_without_kdist(tmp_path, trained):
    model, directory = trained
    made = kdist.checkpoint.consolidate(directory, tmp_path / "model.keras")
    loaded = keras.models.load_model(made)
    x, _ = data()
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6, atol=1e-6
    )
    for a, b in zip(state(loaded), state(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_files_are_those_that_keras_writes(tmp_path, trained):
    model, directory = trained
    kdist.checkpoint.consolidate(directory, tmp_path / "ours.weights.h5")
    model.save_weights(tmp_path / "keras.weights.h5")

    def content(path):
        found = {}
        with h5py.File(path) as file:
            file.visititems(lambda name, one: found.update({name: (dict(one.attrs), one)}))
            return {
                name: (attributes, np.array(one) if isinstance(one, h5py.Dataset) else None)
                for name, (attributes, one) in found.items()
            }

    ours, theirs = content(tmp_path / "ours.weights.h5"), content(tmp_path / "keras.weights.h5")
    assert sorted(ours) == sorted(theirs)
    for name, (attributes, values) in theirs.items():
        assert ours[name][0] == attributes
        np.testing.assert_array_equal(ours[name][1], values)
    plain = build()
    plain.load_weights(tmp_path / "ours.weights.h5")


def test_safetensors(tmp_path, trained):
    model, directory = trained
    content = kdist.checkpoint.consolidate(directory, tmp_path / "a.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for weight in model.weights:
        entry = header[weight.path]
        start, stop = (8 + size + at for at in entry["data_offsets"])
        values = np.frombuffer(content[start:stop], "<f4").reshape(entry["shape"])
        np.testing.assert_array_equal(values, weight.numpy())
    assert (8 + size) % 8 == 0
    assert header["__metadata__"]["step"] == "4"


PARTS = """
import sys
import kdist, keras
from kdist.checkpoint.store import CHUNK_BYTES

def held(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(one.split()[1]) << 10 for one in lines if one.startswith(what + ":"))

what, folder = sys.argv[1:]
for name, rows in (("small", 8), ("large", CHUNK_BYTES // 4 // 1024 * 12)):
    at = f"{folder}/{name}"
    if what == "save":
        layer = keras.layers.Embedding(rows, 1024, embeddings_initializer="ones")
        kdist.checkpoint.save(keras.Sequential([keras.Input((1,)), layer]), at)
        continue
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    base = held("VmRSS")
    kdist.checkpoint.consolidate(at, f"{at}.{what}")
    more = held("VmHWM") - base
print(more / CHUNK_BYTES if what != "save" else "")
"""


@pytest.mark.long
def test_in_bounded_memory(tmp_path):
    """Measured: of a weight of twelve chunks no more than seven are in memory at once."""
    # So that what is freed is given back, and the peak is one of what is in use.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
    ours = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(CHECKOUT)}
    for what in ("save", "weights.h5", "safetensors", "keras"):
        done = subprocess.run(
            [sys.executable, "-c", PARTS, what, str(tmp_path)],
            env={**os.environ, **malloc, **ours},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert what == "save" or 0.5 < float(done.stdout.split()[-1]) < 7, (what, done.stdout)


def test_bfloat16_and_arrays_larger_than_a_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("kdist.checkpoint.one_file.CHUNK_BYTES", 64)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(33, dtype="bfloat16", name="half")]
    )
    kdist.checkpoint.save(model, tmp_path)
    made = kdist.checkpoint.consolidate(tmp_path, tmp_path / "model.keras")
    loaded = keras.models.load_model(made)
    for a, b in zip(loaded.weights, model.weights, strict=True):
        assert a.dtype == "bfloat16"
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    kdist.checkpoint.consolidate(tmp_path, tmp_path / "model.safetensors")


class Odd(keras.layers.Layer):
    """Saves what is no variable."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, target):
        target["all"] = np.ones(3)


def test_what_cannot_be_made_is_said(tmp_path, trained):
    _, directory = trained
    with pytest.raises(kdist.checkpoint.CheckpointError, match=r"ends in one of.*model\.npz"):
        kdist.checkpoint.consolidate(directory, tmp_path / "model.npz")
    model = keras.Sequential([keras.Input((2,)), Odd(name="odd")])
    kdist.checkpoint.save(model, tmp_path / "odd")
    with pytest.raises(kdist.checkpoint.CheckpointError, match="odd/vars/all"):
        kdist.checkpoint.consolidate(tmp_path / "odd", tmp_path / "model.keras")
    assert not list(tmp_path.glob("model*"))


def test_the_command_line(tmp_path, trained, capsys):
    model, _ = trained
    for step in (1, 2):
        kdist.checkpoint.save(model, tmp_path, step=step)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 2" in shown
    assert "up/kernel" in shown
    assert "older: step-00000001" in shown
    assert main(["verify", str(tmp_path)]) == 0
    largest = max((tmp_path / "step-00000001" / STORE).rglob("*"), key=lambda f: f.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 1
    largest.write_bytes(content)
    assert main(["verify", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "damaged" in shown
    assert main(["consolidate", str(tmp_path), str(tmp_path / "one.keras")]) == 0
    assert (tmp_path / "one.keras").exists()
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "no whole checkpoint" in capsys.readouterr().err
