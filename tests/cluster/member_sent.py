"""What the processes of the tests of what is sent run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings

import kdist
from kdist.graphs.executed import largest, watch
from kdist.storage.transfer import process_of

import keras
import numpy as np
import tensorflow as tf
from member import joined


def read_rows() -> tf.data.Dataset:
    """A batch of 8 rows of 256 numbers, twice, from a file."""
    numbers = tf.data.FixedLengthRecordDataset(os.environ["TEST_FOLDER"] + "/rows", 256 * 4)
    rows = numbers.map(lambda text: tf.reshape(tf.io.decode_raw(text, tf.float32), (256,)))
    return rows.map(lambda row: (row, row)).batch(8, drop_remainder=True)


def sends() -> None:
    """Prints what an executed step sends between processes, and what its plan says."""
    joined()
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(256, activation="gelu", name=f"up{i}") for i in range(3)]
    made = keras.Sequential([keras.Input((256,)), *layers])
    axes = json.loads(os.environ["TEST_AXES"])
    if "model" in axes:
        kdist.shard(layers[0], ((1, 1), (1, axes["model"])))
        kdist.shard(layers[1], ((1, axes["model"]), (axes["model"], 1)))
    level = int(os.environ["TEST_LEVEL"])
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0)
    )
    kdist.parallelize(made, config)
    made.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.zeros((8, 256), "float32")
    made.evaluate(x, x, verbose=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if "TEST_FOLDER" in os.environ:
            step = largest(watch(lambda: made.fit(read_rows(), verbose=0)))
        else:
            step = largest(watch(lambda: made.train_on_batch(x, x)))
    crossing = [t for t in step.transfers if process_of(t.source) != process_of(t.target)]
    found = {
        "sent": [(t.tensor, t.nbytes) for t in crossing if not t.control],
        "planned": dataclasses.asdict(made.plan().between_processes()),
        "printed": str(made.plan()),
        "said": [str(one.message) for one in said],
    }
    print("RESULT " + json.dumps(found), flush=True)


def routes() -> None:
    """Trains by each algorithm, and by one plain device; prints what differs and what is sent."""
    joined()
    keras.config.set_floatx("float64")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 48)), rng.normal(size=(16, 4))
    axes = json.loads(os.environ["TEST_AXES"])

    def built() -> keras.Model:
        keras.utils.set_random_seed(7)
        # No biases: pieces of them were as small as the scalars that travel too.
        layers = [keras.layers.Dense(48, "gelu", False, name=f"up{i}") for i in range(3)]
        out = keras.layers.Dense(4, use_bias=False, name="out")
        made = keras.Sequential([keras.Input((48,)), *layers, out])
        if "model" in axes:
            kdist.shard(layers[0], ((1, 1), (1, axes["model"])))
            kdist.shard(layers[1], ((1, axes["model"]), (axes["model"], 1)))
        return made

    plain = built()
    plain.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    with tf.device("CPU:0"):
        plain.fit(x, y, batch_size=16, epochs=3, verbose=0)
    found = []
    for level in json.loads(os.environ["TEST_LEVELS"]):
        for algorithm in json.loads(os.environ["TEST_ALGORITHMS"]):
            made = built()
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(**axes),
                pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
                optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
                # The two largest parameters travel alone, the others in buckets.
                fusion=kdist.FusionConfig(mode="size", size_mb=0.02, algorithm=algorithm),
            )
            kdist.parallelize(made, config)
            made.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
            step = largest(watch(functools.partial(made.train_on_batch, x, y)))
            made.fit(x, y, batch_size=16, epochs=2, verbose=0)
            crossing = [t for t in step.transfers if process_of(t.source) != process_of(t.target)]
            pairs = zip(made.get_weights(), plain.get_weights(), strict=True)
            one = {
                "case": [level, algorithm],
                "off": max(float(np.abs(a - b).max()) for a, b in pairs),
                "sent": [(t.tensor, t.nbytes) for t in crossing if not t.control],
                "planned": dataclasses.asdict(made.plan().between_processes()),
            }
            found.append(one)
    print("RESULT " + json.dumps(found), flush=True)


def sent_by(hosts: list[str]) -> int:
    """Bytes that hosts have put on the network so far, in frames."""
    found = 0
    for name in hosts:
        command = ["ip", "netns", "exec", name, "cat", "/proc/net/dev"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (line,) = [line for line in text.splitlines() if line.strip().startswith("wire:")]
        found += int(line.split(":")[1].split()[8])
    return found


def on_wires() -> None:
    """Prints what some steps put on the network, by each algorithm, and what their plans say."""
    joined()
    hosts, steps = os.environ["TEST_HOSTS"].split(), 4
    replicas = len(hosts) * int(os.environ["TEST_DEVICES"])
    found = []
    for what, level, algorithm in json.loads(os.environ["TEST_CASES"]):
        made, x, y = looking_up(replicas) if what == "table" else multiplying(replicas)
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(data=replicas),
            optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
            fusion=kdist.FusionConfig(mode="size", size_mb=2, algorithm=algorithm),
        )
        kdist.parallelize(made, config)
        made.compile(keras.optimizers.SGD(0.01), "mse")
        made.train_on_batch(x, y)
        before = sent_by(hosts)
        for _ in range(steps):
            made.train_on_batch(x, y)
        sent = (sent_by(hosts) - before) / steps
        planned = made.plan().between_processes()
        # A replica to a process: what travels between devices travels between processes.
        rows = sum(table.nbytes(IDS) for table in made.plan().tables())
        batch = (x.nbytes + y.nbytes) * (len(hosts) - 1) // len(hosts)
        found.append([sent, planned.nbytes + rows + batch, dict(planned.ways)])
    print("RESULT " + json.dumps(found), flush=True)


IDS = 1024
"""Rows of a table that a replica looks up."""


def multiplying(replicas: int) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Four kernels of a megabyte, and a batch."""
    layers = [keras.layers.Dense(512, use_bias=False) for _ in range(4)]
    x = np.zeros((2 * replicas, 512), "float32")
    return keras.Sequential([keras.Input((512,)), *layers]), x, x


def looking_up(replicas: int) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A table of 32 megabytes, and a batch of which each example looks up rows of its own."""
    layers = [keras.layers.Embedding(32768, 256), keras.layers.GlobalAveragePooling1D()]
    ids = np.arange(replicas * IDS, dtype="int32").reshape(2 * replicas, IDS // 2)
    inputs = keras.Input((IDS // 2,), dtype="int32")
    return keras.Sequential([inputs, *layers]), ids, np.zeros((2 * replicas, 256), "float32")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
