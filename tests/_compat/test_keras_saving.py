"""Where Keras stores variables: the recorder sees what a file has."""

from kdist._compat import keras_saving

import h5py
import keras
import numpy as np
import pytest


@pytest.mark.parametrize("scaled", [False, True])
def test_places_are_those_of_a_file(tmp_path, scaled):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.1)])
    optimizer = keras.optimizers.Adam()
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    found, names = keras_saving.places(model)
    model.save(tmp_path / "model", zipped=False)
    with h5py.File(tmp_path / "model" / keras_saving.FILES["weights"]) as file:
        stored: dict = {}
        file.visititems(
            lambda name, one: stored.update({name: one.shape}) if hasattr(one, "shape") else None
        )
        named = {path: file[path].attrs["name"] for path in names}
    assert {path: tuple(value.shape) for path, value in found.items()} == stored
    assert named == names


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


def test_what_cannot_be_mapped_is_read(tmp_path):
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["plain"] = np.arange(6.0)
        file["number"] = 3.0
        file.create_dataset("packed", data=np.arange(6.0), compression="gzip")
    with h5py.File(tmp_path / "w.h5") as file:
        maps: dict = {}
        found = keras_saving._mapped(file["plain"], maps)
        np.testing.assert_array_equal(found, np.arange(6.0))
        assert keras_saving._mapped(file["packed"], maps) is None
        assert keras_saving._mapped(file["number"], maps) is None
