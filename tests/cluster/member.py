"""What the processes of these tests run."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import kdist
from kdist._compat import cluster_runtime
from kdist.cluster.joining import controller

import keras
import numpy as np
import tensorflow as tf

SILENCE = float(os.environ.get("TEST_SILENCE", "20"))
START = float(os.environ.get("TEST_START", "60"))


def joined(threads_per_op: int | None = None) -> None:
    """Joins, with the deadlines that a test says."""
    devices = int(os.environ.get("TEST_DEVICES", "2"))
    before = list(logging.root.handlers)
    kdist.init(devices, threads_per_op, start_timeout_s=START, peer_timeout_s=SILENCE)
    assert logging.root.handlers == before, "a script's `logging.basicConfig` is without effect"
    print("joined", flush=True)


def data() -> tuple[Any, Any]:
    """The same examples in every process."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(32, 12)), rng.normal(size=(32, 4))


def model() -> keras.Model:
    """A model over all devices of all processes."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)]
    made = keras.Sequential([keras.Input((12,)), *layers])
    axes = {"data": int(os.environ.get("TEST_MESH", "4"))}
    axes = json.loads(os.environ["TEST_AXES"]) if "TEST_AXES" in os.environ else axes
    coded = kdist.StateFormatConfig(first="1-6-9", second="0-6-10")
    state = {"state_format": coded} if "TEST_CODED" in os.environ else {}
    optimizer = kdist.OptimizerConfig(level=1, threshold_kb=0, **state)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map={".*/dense/kernel": (None, "model")} if "model" in axes else {},
        optimizer=optimizer,
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
    )
    kdist.parallelize(made, config)
    made.compile(keras.optimizers.Adam(0.01), "mse")
    return made


def ends() -> None:
    """Ends with an exit code, as users end programs."""
    joined()
    sys.exit(int(os.environ["TEST_CODE"]))


def leaves() -> None:
    """Ends as `ends` does, by another way."""
    joined()
    code = int(os.environ["TEST_CODE"])
    if os.environ["TEST_WAY"] == "quit":
        quit(code)
    try:
        sys.exit(code)
    except SystemExit:
        sys.excepthook = lambda *given: None
    if os.environ["TEST_WAY"] == "hook":
        raise KeyError("of the user")


def raises() -> None:
    """Fails in Python."""
    joined()
    raise KeyError("of the user")


def writes() -> None:
    """A script with effects of its own before it joins, others in each process, and after."""
    folder, process = Path(os.environ["TEST_FOLDER"]), os.environ["KDIST_PROCESS_ID"]
    print("before", flush=True)
    np.random.seed(int(process))
    os.environ["TEST_MESH"] = str(4 - int(process))  # of process 0 only is what stands behind
    (folder / f"before-{process}").write_text(str(np.random.randint(1000)))
    joined()
    (folder / f"after-{process}").write_text("")
    print("devices", len(kdist.mesh(data=int(os.environ["TEST_MESH"])).devices.flat), flush=True)


def wanted() -> None:
    """Somebody takes process 0's port while the others start; then a second way to join."""
    use = cluster_runtime.use

    def late(addresses: Any) -> None:
        port = int(addresses[0].rpartition(":")[2])
        try:
            taken.append(socket.create_server(("", port)))
        except OSError:
            print("held", flush=True)
        use(addresses)

    taken: list[socket.socket] = []
    cluster_runtime.use = late
    joined()
    print("server at", controller().addresses[0], flush=True)
    try:
        kdist.comm.connect(["127.0.0.1:1", "127.0.0.1:2"], 0)
    except ValueError as error:
        print("REFUSED", error, flush=True)
    made, (x, y) = model(), data()
    made.fit(x, y, batch_size=8, verbose=0)
    print("trained", flush=True)


def trains() -> None:
    """Trains, and prints what came out."""
    joined()
    made, (x, y) = model(), data()
    history = made.fit(x, y, batch_size=8, epochs=3, verbose=0).history
    weights = [w.tolist() for w in made.get_weights()]
    found = {"loss": history["loss"], "weights": weights, "predicted": made.predict(x).sum()}
    print("RESULT " + json.dumps(found), flush=True)


def assigns() -> None:
    """Reads and assigns a variable of process 1 between calls of a function that changes it."""
    if "TF_CONFIG" in os.environ:
        tf.distribute.MultiWorkerMirroredStrategy()
    joined()
    there = "/job:worker/task:1/device:CPU:0"
    with tf.device(there):
        variable = tf.Variable(tf.zeros([100]))

    @tf.function
    def step() -> Any:
        with tf.device(there):
            found = tf.identity(variable)
            with tf.control_dependencies([found]):
                variable.assign(tf.zeros([100]))
        return found[0]

    step()
    read, seen = [], []
    for one in range(1, 201):
        with tf.device(there):
            variable.assign(np.full([100], one, "float32"))
            value = variable.read_value()
        seen.append(float(step()) == one)
        read.append(float(value[0]) == one)
    print(f"in order: {all(read)} {all(seen)}", flush=True)


def strategy() -> None:
    """A model from the scope of a strategy that has started a cluster of its own."""
    keras.config.set_floatx("float64")
    scope = tf.distribute.MultiWorkerMirroredStrategy()

    def build() -> keras.Model:
        layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)]
        made = keras.Sequential([keras.Input((12,)), *layers])
        made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return made

    with scope.scope():
        made = build()
    before = tf.Variable(3.0)
    try:
        kdist.parallelize(made)
    except ValueError as error:
        print("REFUSED", error, flush=True)
    try:
        kdist.init(start_timeout_s=START, peer_timeout_s=SILENCE)
    except ValueError as error:
        print("REFUSED", error, flush=True)
        os._exit(3)  # the strategy's servers wait for each other
    kdist.init()
    mesh = kdist.mesh_from_strategy(scope)
    print("devices", [str(one) for one in mesh.devices.flat], flush=True)
    kdist.parallelize(made)
    plain, (x, y) = build(), data()
    plain.set_weights(made.get_weights())
    found, wanted = (
        one.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False).history
        for one in (made, plain)
    )
    assert float(before) == 3.0, "what was made before stays"
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-9)
    for mine, other in zip(made.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-9)
    print("equal", flush=True)
    sys.exit(int(os.environ.get("TEST_CODE", "0")))


def goes_on() -> None:
    """Trains until something fails."""
    joined()
    made, (x, y) = model(), data()

    class Telling(keras.callbacks.Callback):
        """Tells a test that training runs."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch % 20 == 2:
                print("training", flush=True)

    made.fit(x, y, batch_size=8, epochs=1_000_000, verbose=0, callbacks=[Telling()])


def catches() -> None:
    """Trains until something fails, and goes on without the others."""
    try:
        goes_on()
    except kdist.comm.PeerError as error:
        print("CAUGHT", list(error.peers), flush=True)


def interrupted() -> None:
    """Trains until Ctrl-C, and saves then, as users do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests' own is ignored
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joined()
    made, (x, y) = model(), data()

    class Telling(keras.callbacks.Callback):
        """Tells a test that training runs."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                print("training", flush=True)

    try:
        made.fit(x, y, batch_size=8, epochs=1_000_000, verbose=0, callbacks=[Telling()])
    except KeyboardInterrupt:
        path = os.path.join(os.environ["TEST_FOLDER"], "kept.keras")
        made.save(path)
        print("saved", keras.models.load_model(path).count_params(), flush=True)


def saves() -> None:
    """Trains with checkpoints, where files cannot grow."""
    if "TEST_FILE_BYTES" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["TEST_FILE_BYTES"]),) * 2)
    joined()
    made, (x, y) = model(), data()
    saver = kdist.callbacks.ShardedCheckpoint(os.environ["TEST_FOLDER"])
    made.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[saver])


def shares() -> None:
    """Trains with checkpoints, and compares the last one with what is in the devices."""
    joined()
    made, (x, y) = model(), data()
    folder = os.environ["TEST_FOLDER"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = kdist.callbacks.ShardedCheckpoint(folder, every_steps=1, keep=2)
        made.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[saver])
    print("told", json.dumps([str(one.message) for one in caught]), flush=True)
    trained = [np.array(v) for v in (*made.variables, *made.optimizer.variables)]
    made.fit(x, y, batch_size=8, verbose=0)
    kdist.checkpoint.restore(made, folder)
    again = [np.array(v) for v in (*made.variables, *made.optimizer.variables)]
    print("equal", all(map(np.array_equal, trained, again)), len(trained), flush=True)


def writes_there() -> None:
    """Has each replica write a file."""
    joined()
    made, (x, y) = model(), data()
    made.fit(x, y, batch_size=8, verbose=0)
    path = os.path.join(os.environ["TEST_FOLDER"], "file")

    class Writing(keras.layers.Layer):
        """Writes what it is called with, on each replica."""

        def call(self, values: Any) -> Any:
            text = tf.io.serialize_tensor(tf.tile(values, (1, 4096)))
            with tf.control_dependencies([tf.io.write_file(path, text)]):
                return tf.identity(values)

    layers = [keras.Input((12,)), Writing(), keras.layers.Dense(4)]
    writing = keras.Sequential(layers)
    kdist.parallelize(writing, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    writing.compile("sgd", "mse")
    writing.fit(x, y, batch_size=8, verbose=0)


def ends_early() -> None:
    """Process 1 ends when it has come, before its server is there."""

    def end(*given: Any) -> None:
        while not Path(os.environ["TEST_FOLDER"], "end").exists():
            time.sleep(0.05)
        os.abort()

    if os.environ["KDIST_PROCESS_ID"] == "1":
        cluster_runtime.serve = end
    joined()


def large() -> None:
    """Trains a model that needs half a gigabyte on each device; process 1 may have less."""
    file = Path(os.environ["TEST_FOLDER"], "joined")

    def limit() -> None:
        while not file.exists():
            time.sleep(0.05)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = now + (int(os.environ["TEST_MORE_MEGABYTES"]) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    if "TEST_MORE_MEGABYTES" in os.environ:
        threading.Thread(target=limit, daemon=True).start()
    joined()
    file.touch()
    time.sleep(0.5)
    keras.config.set_floatx("float64")
    layers = [keras.Input((4096,)), keras.layers.Dense(4096), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    kdist.parallelize(made, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    made.compile("adam", "mse")
    made.fit(np.ones((8, 4096)), np.ones((8, 1)), batch_size=8, epochs=3, verbose=0)
    print("trained", flush=True)


def mislabels() -> None:
    """Trains on labels of which one, in either process's rows, is none of the model's."""
    joined()
    made, (x, _) = model(), data()
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for row in (2, 2, 2, 30, 30, 30):
        try:
            made.fit(x, np.where(np.arange(32) == row, 9, 1), batch_size=32, shuffle=False)
        except tf.errors.OpError as error:
            print("SAID", "outside the valid range" in str(error), error, flush=True)
    history = made.fit(x, np.ones(32), batch_size=32).history
    print("goes on", np.isfinite(history["loss"]), flush=True)
    python = keras.layers.Lambda(
        lambda v: tf.ensure_shape(tf.numpy_function(np.abs, [v], v.dtype), v.shape)
    )
    calls = keras.Sequential([keras.Input((12,)), python])
    kdist.parallelize(calls, kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    calls.predict(x)


def forks() -> None:
    """A fork ends as scripts do, then training goes on; checkpoints need messages."""
    joined()
    if not (child := os.fork()):
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    made, (x, y) = model(), data()
    saver = kdist.callbacks.ShardedCheckpoint(os.environ["TEST_FOLDER"], every_steps=2)
    made.fit(x, y, batch_size=8, verbose=0, callbacks=[saver])
    print("trained", flush=True)
    sys.exit(5)


def resumes() -> None:
    """Trains with checkpoints; the first start fails in one process."""
    joined()
    made, (x, y) = model(), data()
    folder = os.environ["TEST_FOLDER"]
    again = kdist.callbacks.ShardedCheckpoint(folder, every_steps=2, resume=True)

    class Failing(keras.callbacks.Callback):
        """Ends the first start in the middle of an epoch."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if os.environ.get("KDIST_START") == "0" and self.model.optimizer.iterations == 7:
                raise RuntimeError("of the first start")

    history = made.fit(
        x, y, batch_size=8, epochs=3, verbose=0, callbacks=[again, Failing()]
    ).history
    print("RESULT " + json.dumps({"loss": history["loss"]}), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
