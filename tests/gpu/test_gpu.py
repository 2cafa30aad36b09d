"""What needs a GPU: skipped where there is none, with a line that says so."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.storage.variables import parts_of

import keras
import numpy as np
import pytest
import tensorflow as tf

GPUS = len(tf.config.list_logical_devices("GPU"))
"""Cards, or the parts of one: see `tests/one_card.py`."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="TensorFlow finds no GPU on this machine"),
]
several = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, there are {GPUS}")


def losses(axes: dict[str, int], devices: list[str], **options: Any) -> tuple[Any, list[float]]:
    """A model trained over some devices, and its losses."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Flatten()(kdist.layers.HostEmbedding(24, 4, name="table")(inputs))
    x = keras.layers.Dense(16, "relu", name="up")(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
    mesh = kdist.mesh(devices=devices, **axes)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, **options))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 24, (32, 6)), rng.normal(size=(32, 4))
    return model, model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]


def test_one_gpu_equals_one_cpu() -> None:
    """The table stays in host memory, all other weights are on the GPU; XLA as Keras has it."""
    model, found = losses({"data": 1}, ["gpu:0"])
    _, expected = losses({"data": 1}, ["cpu:0"])
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    where = {v.path: {part.device for part in parts_of(v)} for v in model.weights}
    for path, devices in where.items():
        kind = "CPU" if "table" in path else "GPU"
        assert all(kind in (device or "") for device in devices), (path, devices)
    assert attached(model).jit_compile is True


def test_memory_grows() -> None:
    """As much as it may: a part of a card has what it was given, and that stays."""
    (first, *_) = tf.config.list_physical_devices("GPU")
    cut = tf.config.get_logical_device_configuration(first) is not None
    assert bool(tf.config.experimental.get_memory_growth(first)) is not cut


@several
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("axes", [{"data": 2}, {"model": 2}])
def test_two_gpus_equal_one_cpu(axes: dict[str, int], level: int) -> None:
    options: dict[str, Any] = {"layout_map": {".*up/kernel": (None, "model")}}
    if "data" in axes:
        options = {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0)}
    _, found = losses(axes, ["gpu:0", "gpu:1"], **options)
    _, expected = losses({"data": 1}, ["cpu:0"])
    np.testing.assert_allclose(found, expected, rtol=1e-4)
