"""Models built in the scope of a strategy train on its devices, and equal one device."""

from __future__ import annotations

import kdist
from kdist.api.mirrored_scope import short_name
from kdist.storage.variables import parts_of

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..equivalence.harness import precision

STRATEGIES = {
    "one device": lambda: tf.distribute.OneDeviceStrategy("cpu:1"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["cpu:0", "cpu:2"]),
    "one worker": tf.distribute.MultiWorkerMirroredStrategy,
}


def build() -> keras.Model:
    keras.utils.set_random_seed(5)
    up = keras.layers.Dense(6, activation="tanh", name="up")
    return keras.Sequential([keras.Input((4,)), up, keras.layers.Dense(2, name="head")])


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    return model


def train(model: keras.Model) -> list[float]:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, 4)), draw.normal(size=(20, 2))
    return model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]


@pytest.fixture(autouse=True)
def float64():
    with precision("float64"):
        yield


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_its_devices_are_the_data_axis(name, inside):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = build()
        if inside:
            compiled(model)
    kdist.parallelize(model)
    if not inside:
        compiled(model)
    np.testing.assert_allclose(train(model), train(compiled(build())), rtol=1e-9)
    held = {part.device for part in parts_of(model.weights[0])}
    assert len(held) == len(strategy.extended.worker_devices)
    theirs = {short_name(device) for device in strategy.extended.worker_devices}
    assert {short_name(device) for device in held} == theirs


def test_reshaped():
    strategy = tf.distribute.MirroredStrategy([f"cpu:{n}" for n in range(4)])
    with strategy.scope():
        model = compiled(build())
    mesh = kdist.mesh_from_strategy(strategy, model=2)
    assert mesh.shape == (2, 2)
    assert tuple(mesh.axis_names) == ("data", "model")
    kdist.parallelize(
        model, kdist.ParallelConfig(mesh=mesh, layout_map={".*up/kernel": (None, "model")})
    )
    np.testing.assert_allclose(train(model), train(compiled(build())), rtol=1e-9)
    with pytest.raises(ValueError, match="divide the strategy's devices.*4 devices"):
        kdist.mesh_from_strategy(strategy, model=3)


def test_others_are_refused_with_what_to_use_instead():
    central = tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="MirroredStrategy.*Received: strategy="):
        kdist.mesh_from_strategy(central)
    with central.scope():
        model = build()
    with pytest.raises(ValueError, match="stay on one device"):
        kdist.parallelize(model)
    with pytest.raises(ValueError, match="kdist takes the devices"):
        kdist.mesh_from_strategy(tf.distribute.get_strategy())


def test_several_workers_are_refused(monkeypatch):
    strategy = STRATEGIES["one worker"]()
    spec = tf.train.ClusterSpec({"worker": ["localhost:1", "localhost:2"]})

    class Resolver:
        def cluster_spec(self):
            return spec

    monkeypatch.setattr(type(strategy), "cluster_resolver", property(lambda self: Resolver()))
    with pytest.raises(ValueError, match="of 2 workers"):
        kdist.mesh_from_strategy(strategy)


def test_devices_of_another_kind_are_found_by_their_names(monkeypatch):
    """What a TPUStrategy would give, with its discovery replaced."""
    strategy = STRATEGIES["mirrored"]()
    names = [f"/job:worker/replica:0/task:0/device:TPU:{n}" for n in range(2)]
    monkeypatch.setattr(
        type(strategy.extended), "worker_devices", property(lambda self: tuple(names))
    )
    made = {}
    monkeypatch.setattr(
        "kdist.api.mirrored_scope.mesh",
        lambda devices, **axes: made.update(devices=devices, **axes),
    )
    kdist.mesh_from_strategy(strategy)
    assert made == {"devices": ["tpu:0", "tpu:1"], "data": 2}
