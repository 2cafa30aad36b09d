"""Files of Keras, and of others, out of a checkpoint, without the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import kdist
from kdist._compat.keras_saving import FILES
from kdist.checkpoint.__main__ import main
from kdist.checkpoint.keras_description import KnownPlaces
from kdist.checkpoint.manifest import STORE
from kdist.checkpoint.snapshot import snapshot
from kdist.checkpoint.writer import Target, write

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

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


def content(file):
    """Of a `.weights.h5` file: name -> attributes and values."""
    found = {}
    with h5py.File(file) as opened:
        opened.visititems(lambda name, one: found.update({name: (dict(one.attrs), one)}))
        return {
            name: (attributes, np.array(one) if isinstance(one, h5py.Dataset) else None)
            for name, (attributes, one) in found.items()
        }


def check_same(ours, theirs, rtol=0.0):
    """Two files have the same in them."""
    ours, theirs = content(ours), content(theirs)
    assert sorted(ours) == sorted(theirs)
    for name, (attributes, values) in theirs.items():
        assert ours[name][0] == attributes
        if values is not None:
            np.testing.assert_allclose(ours[name][1], values, rtol=rtol, atol=rtol, err_msg=name)


def test_files_are_those_that_keras_writes(tmp_path, trained):
    model, directory = trained
    kdist.checkpoint.consolidate(directory, tmp_path / "ours.weights.h5")
    model.save_weights(tmp_path / "keras.weights.h5")
    check_same(tmp_path / "ours.weights.h5", tmp_path / "keras.weights.h5")
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


def members(path):
    """The files in an archive, without the weights."""
    with zipfile.ZipFile(path) as archive:
        return {
            one: archive.read(one)
            for one in archive.namelist()
            if one not in (FILES["weights"], FILES["metadata"])  # which has the date
        }


def adapted():
    """Layers that keep vocabularies, and weights that are no variables, in Keras's files."""
    words = keras.Input((3,), dtype="string")
    look_up = keras.layers.StringLookup()
    look_up.adapt(np.array([["red", "green", "blue"]]))
    weighted = keras.layers.TextVectorization(output_mode="tf_idf", name="weighted")
    weighted.adapt(np.array(["red green", "blue", "red"]))
    x = keras.layers.Embedding(8, 4, name="table")(look_up(words))
    y = keras.layers.Dense(4)(weighted(words[:, :1]))
    x = keras.layers.Add()([keras.layers.GlobalAveragePooling1D()(x), y])
    return keras.Model(words, keras.layers.Dense(3, name="head")(x))


def test_what_layers_keep_in_files_of_their_own_is_in_a_keras_file(tmp_path):
    model = adapted()
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("adam", "mse")
    words = tf.constant([["red", "blue", "black"], ["green", "red", "red"]])
    model.fit(words, np.ones((2, 3)), verbose=0)
    kdist.checkpoint.save(model, tmp_path)
    model.save(tmp_path / "keras.keras")
    ours = kdist.checkpoint.consolidate(tmp_path, tmp_path / "ours.keras")
    found = members(ours)
    assert any(one.endswith("vocabulary.txt") for one in found)
    assert found == members(tmp_path / "keras.keras")
    for name in ("ours", "keras"):
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as archive:
            (tmp_path / f"{name}.h5").write_bytes(archive.read(FILES["weights"]))
    check_same(tmp_path / "ours.h5", tmp_path / "keras.h5")
    loaded = keras.models.load_model(ours)
    expected = model.predict(words, verbose=0)
    np.testing.assert_allclose(loaded.predict(words, verbose=0), expected, rtol=1e-6)


def with_lora():
    """Every kind of layer that LoRA can be enabled in."""
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(12, 6, name="table")(tokens)
    x = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de", name="heads")(x)
    x = keras.layers.Reshape((4, 6))(x)
    x = keras.layers.Conv1D(6, 2, name="conv")(x)
    x = keras.layers.Dense(5, name="up")(keras.layers.Flatten()(x))
    model = keras.Model(tokens, keras.layers.Dense(3, name="head")(x))
    for n, name in enumerate(("table", "heads", "conv", "up")):
        model.get_layer(name).enable_lora(2, lora_alpha=n + 1)
    return model


def plain():
    """Layers that `several` tells apart."""
    layers = [keras.layers.Dense(4, name="up"), keras.layers.Dense(3, name="head")]
    table = keras.layers.Embedding(12, 6, name="table")
    return keras.Sequential([keras.Input((4,)), table, keras.layers.Flatten(), *layers])


def several():
    """Optimizers, two of the same class."""
    kinds = keras.optimizers
    rules = {".*up.*": kinds.SGD(0.1, 0.9), ".*table.*": kinds.Adam(0.2)}
    return kinds.MultiOptimizer(kinds.OptimizerMap(kinds.Adam(0.1), rules))


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(with_lora, lambda: "adam"), (plain, several)],
    ids=["lora", "multi_optimizer"],
)
def test_what_keras_adds_up_or_finds_in_members_is_made(tmp_path, monkeypatch, make, optimizer):
    monkeypatch.setattr("kdist.checkpoint.one_file.CHUNK_BYTES", 64)
    keras.utils.set_random_seed(4)
    model = make()
    settings = kdist.OptimizerConfig(level=3, threshold_kb=0)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=settings))
    model.compile(optimizer(), "mse")
    tokens = np.random.default_rng(0).integers(0, 12, (8, 4))
    model.fit(tokens, np.ones((8, model.output_shape[-1])), verbose=0)
    kdist.checkpoint.save(model, tmp_path)
    model.save(tmp_path / "keras", zipped=False)
    with zipfile.ZipFile(kdist.checkpoint.consolidate(tmp_path, tmp_path / "a.keras")) as archive:
        (tmp_path / "ours.h5").write_bytes(archive.read(FILES["weights"]))
    check_same(tmp_path / "ours.h5", tmp_path / "keras" / FILES["weights"], rtol=1e-6)
    assert [layer.lora_enabled for layer in model.layers if hasattr(layer, "lora_rank")] == [
        layer.lora_rank is not None for layer in model.layers if hasattr(layer, "lora_rank")
    ]


class Odd(keras.layers.Layer):
    """Saves what is no variable."""

    def __init__(self, rows, **options):
        super().__init__(**options)
        self.rows, self.fails = rows, False

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale", initializer="ones")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, target):
        target["all"] = np.full((self.rows, 1024), self.scale.numpy())

    def save_assets(self, folder):
        if self.fails:
            raise RuntimeError("no room")


def test_small_values_that_are_no_variables_are_those_of_their_time(tmp_path):
    """A description is kept from one checkpoint to the next; such values are found anew."""
    layer = Odd(2)
    model = keras.Sequential([keras.Input((2,)), layer])
    known = KnownPlaces()
    for step in (1, 2):
        layer.scale.assign(step)
        write(snapshot(model, step, known=known), Target(tmp_path))
        made = kdist.checkpoint.consolidate(tmp_path, tmp_path / "a.weights.h5", step=step)
        (values,) = (one for _, one in content(made).values() if one is not None)
        np.testing.assert_array_equal(values, np.full((2, 1024), step))


def test_what_cannot_be_made_is_said(tmp_path, trained):
    _, directory = trained
    with pytest.raises(kdist.checkpoint.CheckpointError, match=r"ends in one of.*model\.npz"):
        kdist.checkpoint.consolidate(directory, tmp_path / "model.npz")
    model = keras.Sequential([keras.Input((2,)), Odd(300, name="odd")])
    kdist.checkpoint.save(model, tmp_path / "odd")
    with pytest.raises(kdist.checkpoint.CheckpointError, match="odd/vars/all"):
        kdist.checkpoint.consolidate(tmp_path / "odd", tmp_path / "model.keras")
    layer = Odd(1)
    layer.fails = True
    kdist.checkpoint.save(keras.Sequential([keras.Input((2,)), layer]), tmp_path / "fails")
    with pytest.raises(kdist.checkpoint.CheckpointError, match="RuntimeError: no room"):
        kdist.checkpoint.consolidate(tmp_path / "fails", tmp_path / "model.keras")
    assert not list(tmp_path.glob("model*"))


def test_the_command_line_prints_brackets(tmp_path, capsys):
    folder, out = tmp_path / "runs[bold]", tmp_path / "one[red].keras"
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="block[red]x")])
    kdist.checkpoint.save(model, folder, step=1)

    def shown(*arguments, code=0):
        assert main([str(one) for one in arguments]) == code
        return "".join(capsys.readouterr().out.split())

    assert "runs[bold]/step-00000001:step1" in (text := shown("inspect", folder))
    assert "block[red]x/kernel" in text
    assert "runs[bold]/step-00000001:whole" in shown("verify", folder)
    assert "one[red].keras:" in shown("consolidate", folder, out)
    for file in (folder / "step-00000001" / STORE).rglob("*"):
        if file.is_file():
            file.unlink()
    text = shown("verify", folder, code=1)
    assert "runs[bold]/step-00000001:damaged:" in text and "block[red]x/" in text


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
