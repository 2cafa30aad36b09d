"""Models built in the scope of a strategy train on its devices, and equal one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_training_inside_the_scope_is_refused():
    strategy = STRATEGIES["mirrored"]()
    x = np.ones((8, 4))
    with strategy.scope():
        model = compiled(kdist.parallelize(build()))
        for call in (lambda: train(model), lambda: model.evaluate(x, x), lambda: model.predict(x)):
            with pytest.raises(ValueError, match="Train outside of.*Received: strategy="):
                call()
    np.testing.assert_allclose(train(model), train(compiled(build())), rtol=1e-9)


def test_what_has_trained_in_the_scope_goes_on():
    """Weights, and the optimizer's state and step, are those that the strategy's training left."""
    with STRATEGIES["mirrored"]().scope():
        model = compiled(build())
        train(model)
    plain = compiled(build())
    train(plain)
    kdist.parallelize(model)
    np.testing.assert_allclose(train(model), train(plain), rtol=1e-9)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == 12


SERVERS = """
import kdist, socket
kdist.init(cpu_devices=2)
import keras
import tensorflow as tf

free = [socket.create_server(("localhost", 0)) for _ in range(2)]
jobs = {job: [f"localhost:{one.getsockname()[1]}"] for job, one in zip(("worker", "ps"), free)}
for one in free:
    one.close()
spec = tf.train.ClusterSpec(jobs)
servers = [tf.distribute.Server(spec, job_name=job, task_index=0) for job in jobs]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
for call in (lambda: kdist.mesh_from_strategy(strategy), lambda: kdist.parallelize(model)):
    try:
        call()
    except ValueError as error:
        print("refused", error, flush=True)
"""


def test_parameter_servers_are_refused():
    """A real one, in a process of its own: TensorFlow connects it to its servers for good."""
    checkout = Path(kdist.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", SERVERS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    for line in said:
        assert line.startswith("refused Its workers train without waiting")
        assert "MirroredStrategy" in line and "kdist.init()" in line and "Received: " in line


def tpu_strategy(kind, devices):
    """A strategy of a class of TPUs, over other devices: their discovery is replaced."""

    class Fake(kind):
        def __init__(self):
            self.found = tf.distribute.MirroredStrategy(devices)
            tf.distribute.Strategy.__init__(self, self.found.extended)

    return Fake()


TPUS = [tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy]


@pytest.mark.parametrize("kind", TPUS, ids=["stable", "experimental"])
def test_tpu_strategies_are_taken(kind):
    strategy = tpu_strategy(kind, ["cpu:0", "cpu:1"])
    assert isinstance(strategy, kind)
    with strategy.scope():
        model = compiled(build())
    kdist.parallelize(model)
    np.testing.assert_allclose(train(model), train(compiled(build())), rtol=1e-9)


def test_devices_of_another_kind_are_found_by_their_names(monkeypatch):
    """What a TPUStrategy gives, with its discovery replaced; where they are not, that is said."""
    strategy = tpu_strategy(tf.distribute.TPUStrategy, ["cpu:0", "cpu:1"])
    names = tuple(f"/job:worker/replica:0/task:0/device:TPU:{n}" for n in range(2))
    monkeypatch.setattr(type(strategy.extended), "worker_devices", property(lambda self: names))
    with pytest.raises(ValueError, match="2 devices and there are 0 of type TPU"):
        kdist.mesh_from_strategy(strategy)
    made = {}
    monkeypatch.setattr(
        "kdist.api.mirrored_scope.mesh",
        lambda devices, **axes: made.update(devices=devices, **axes),
    )
    kdist.mesh_from_strategy(strategy)
    assert made == {"devices": ["tpu:0", "tpu:1"], "data": 2}
