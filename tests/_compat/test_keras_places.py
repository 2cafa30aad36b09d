"""Where Keras stores variables: the recorder sees what a file has."""

import zipfile

from kdist._compat import keras_places
from kdist._compat.keras_saving import FILES

import h5py
import keras
import numpy as np
import pytest

KINDS = {
    "plain": keras.optimizers.Adam,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*a.*": keras.optimizers.SGD(0.2)}
        )
    ),
}


@pytest.mark.parametrize("optimizer", KINDS)
def test_places_are_those_of_a_file(tmp_path, optimizer):
    layers = [keras.layers.Dense(2, name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dropout(0.1)])
    layers[1].enable_lora(1)
    model.compile(KINDS[optimizer](), "mse")
    model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    places = keras_places.places(model)
    model.save(tmp_path / "model", zipped=False)
    with h5py.File(tmp_path / "model" / FILES["weights"]) as file:
        stored: dict = {}
        file.visititems(
            lambda name, one: stored.update({name: one.shape}) if hasattr(one, "shape") else None
        )
        named = {path: file[path].attrs["name"] for path in places.names}
    assert {path: tuple(value.shape) for path, value in places.found.items()} == stored
    assert named == places.names
    (product,) = places.added.values()
    assert product.a is layers[1].lora_kernel_a
    assert layers[1].lora_enabled
    assert places.assets == b""


def test_assets_are_those_of_a_file(tmp_path):
    layer = keras.layers.StringLookup()
    layer.adapt(np.array(["a", "b"]))
    model = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    (tmp_path / "assets.zip").write_bytes(keras_places.places(model).assets)
    model.save(tmp_path / "model.keras")

    def found(archive):
        with zipfile.ZipFile(archive) as opened:
            names = [one for one in opened.namelist() if one.startswith(FILES["assets"])]
            return {one: opened.read(one) for one in names}

    assert found(tmp_path / "assets.zip") == found(tmp_path / "model.keras") != {}
