"""What the processes of the tests of settings that are a process's own run."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import kdist

import keras
import tensorflow as tf
from member import data, joined, model
from tensorflow.python.framework import config


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
