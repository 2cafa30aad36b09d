"""What the processes of the tests of settings that are a process's own run."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import tensorflow as tf
from member import data, joined, model
from tensorflow.python.framework import config


def waits() -> None:
    """Freezes process 1, and has TensorFlow wait for it with Python's lock."""
    file = Path(os.environ["TEST_FOLDER"], "process")
    if os.environ["KDIST_PROCESS_ID"] == "1":
        file.write_text(str(os.getpid()))
    joined()
    what = os.environ["TEST_WHAT"]
    add = tf.function(lambda value: value + 1)
    there = "/job:worker/task:1/device:CPU:0"
    with tf.device(there):
        tf.constant(np.ones(1000))  # TensorFlow's own start waits without the lock
    if what == "forgets":
        add(1.0)
    other = int(file.read_text())
    os.kill(other, signal.SIGSTOP)
    while ") T" not in Path(f"/proc/{other}/stat").read_text():
        time.sleep(0.01)
    time.sleep(0.2)  # what it was answering has arrived
    print("frozen", flush=True)
    if what == "traces":
        add.get_concrete_function(tf.TensorSpec([]))
    if what == "forgets":
        del add
        gc.collect()
    if what == "puts":
        with tf.device(there):
            tf.constant(np.ones(1000))
    print("went on", flush=True)


def lends() -> None:
    """Says by `tf.config` which devices each process has, before it joins."""
    (processor,) = tf.config.list_physical_devices("CPU")
    three = [tf.config.LogicalDeviceConfiguration()] * 3
    tf.config.set_logical_device_configuration(processor, three)
    kdist.init()
    names = [one.name for one in tf.config.list_logical_devices("CPU")]
    print("RESULT " + json.dumps(names), flush=True)


def follows() -> None:
    """Sets how kernels work behind `kdist.init`, before and after a first call."""
    joined()
    made, (x, y) = model(), data()
    made.fit(x, y, batch_size=8, verbose=0)
    there = [one.name for one in tf.config.list_logical_devices("CPU")]
    seen = []
    for switch in (config.enable_op_determinism, config.disable_op_determinism):
        switch()
        made.predict(x, verbose=0)
        seen.append([refuses_chance(name) for name in there])
    print("RESULT " + json.dumps(seen), flush=True)


def terminated() -> None:
    """Trains until SIGTERM, which each process takes note of, and saves then."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    joined()
    made, (x, y) = model(), data()

    class Stopping(keras.callbacks.Callback):
        """Ends training within the grace that a scheduler gives."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                print("training", flush=True)
            self.model.stop_training = bool(told)

    made.fit(x, y, batch_size=8, epochs=1_000_000, verbose=0, callbacks=[Stopping()])
    kdist.checkpoint.save(made, os.environ["TEST_FOLDER"])
    print("saved", flush=True)


def refuses_chance(device: str) -> bool:
    """Whether kernels of a device want a seed, as they do where they are to be deterministic."""
    try:
        with tf.device(device):
            tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32)
    except tf.errors.InvalidArgumentError:
        return True
    return False


if __name__ == "__main__":
    globals()[sys.argv[1]]()
