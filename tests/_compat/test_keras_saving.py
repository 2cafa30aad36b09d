"""Files of Keras are read part by part, and described as it describes them."""

import io
import os
import zipfile
from pathlib import Path

from kdist._compat import keras_saving
from kdist.storage import recipes

import h5py
import keras
import numpy as np
import pytest


def test_config_and_metadata_are_those_of_a_file(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    config, metadata = keras_saving.config_and_metadata(model)
    model.save(tmp_path / "model", zipped=False)
    assert (tmp_path / "model" / keras_saving.FILES["config"]).read_text() == config
    assert (tmp_path / "model" / keras_saving.FILES["metadata"]).exists()
    assert "keras_version" in metadata


def test_files_are_mapped(tmp_path):
    """What layers are given of a file, also of one in an archive that is loaded, lies in it."""
    seen = []

    class Own(keras.layers.Dense):
        def load_own_variables(self, store):
            seen.append(store["0"])
            super().load_own_variables(store)

    model = keras.Sequential([keras.Input((3,)), Own(2, dtype="bfloat16")])
    model.save_weights(tmp_path / "w.weights.h5")
    model.save(tmp_path / "model.keras")
    with keras_saving.mapped_files():
        model.load_weights(tmp_path / "w.weights.h5")
        keras.models.load_model(tmp_path / "model.keras", custom_objects={"Own": Own})
    model.load_weights(tmp_path / "w.weights.h5")
    assert [isinstance(one, np.memmap) for one in seen] == [True, True, False]
    for one in seen:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(model.weights[0].value))


class Asked(keras.layers.Layer):
    """Notes what it is given of a file."""

    def build(self, shape):
        self.large = self.add_weight((300, 130), "normal", dtype="bfloat16")
        self.wide = self.add_weight((2, 40000), "normal")
        self.number = self.add_weight((), "ones")

    def load_own_variables(self, store):
        self.given = [store[str(n)] for n in range(3)]
        for variable, value in zip(self.weights, self.given, strict=True):
            variable.assign(value)


def asked():
    layer = Asked()
    return layer, keras.Sequential([keras.Input((3,)), layer])


@pytest.mark.parametrize("way", ["stored", "deflated", "gzip"])
def test_what_does_not_lie_in_a_file_as_it_is(way, tmp_path, monkeypatch):
    """A member of an archive is mapped; what is compressed is unpacked first, chunk by chunk."""
    _, written = asked()
    path = tmp_path / ("w.weights.h5" if way == "gzip" else "model.keras")
    written.save(tmp_path / "plain.keras")
    with zipfile.ZipFile(tmp_path / "plain.keras") as archive:
        if way == "gzip":
            packed(archive.read(keras_saving.FILES["weights"]), path)
        else:
            kind = zipfile.ZIP_STORED if way == "stored" else zipfile.ZIP_DEFLATED
            with zipfile.ZipFile(path, "w", kind) as made:
                for name in archive.namelist():
                    made.writestr(name, archive.read(name))
    made = []
    own = keras_saving._unpacked
    monkeypatch.setattr(keras_saving, "_unpacked", lambda *args: made.append(1) or own(*args))
    layer, model = asked()
    with keras_saving.mapped_files():
        model.load_weights(path)
    large, wide, number = layer.given
    for one in (large, wide):
        assert recipes.is_mapped(one)
        assert Path(one.filename).exists() == (way == "stored")
    assert not isinstance(number, np.memmap)
    assert len(made) == (0 if way == "stored" else 2)
    for one, variable in zip((large, wide), written.weights):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(variable.value))
    for a, b in zip(model.get_weights(), written.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def packed(content, path):
    """The same `.h5` file, its weights compressed."""
    with h5py.File(io.BytesIO(content)) as old, h5py.File(path, "w") as new:

        def copy(name, one):
            into = new.require_group(name) if isinstance(one, h5py.Group) else None
            if into is None:
                how = {"compression": "gzip", "chunks": True} if one.shape else {}
                into = new.create_dataset(name, data=one[()], **how)
            into.attrs.update(one.attrs)

        old.visititems(copy)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "w.h5", "w") as file:
        packed = file.create_dataset("packed", data=np.arange(6.0), compression="gzip")

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="Set TMPDIR .*weight='/packed', bytes=48"):
            keras_saving._unpacked(packed, packed.dtype)
