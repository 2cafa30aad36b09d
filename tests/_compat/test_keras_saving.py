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
