"""A script that trains on all devices of all processes, and goes on where it stopped.

    python -m kdist.launch --processes 2 --cpu-devices 2 examples/cluster/train.py checkpoints

`slurm.sh`, `kubernetes_job.yaml` and `kubernetes_jobset.yaml` beside it start it on several
machines. All must reach the directory of checkpoints: any of them may be process 0 next time.
"""

import sys

import kdist

import keras
import numpy as np
import tensorflow as tf


def main(checkpoints: str) -> float:
    """Trains a small network; returns the last epoch's loss."""
    kdist.init()  # processes 1 and on stay in here, and lend their devices
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    )
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=len(devices)),
        optimizer=kdist.OptimizerConfig(level=1, threshold_kb=0),
    )
    kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(512, 16))
    y = x.sum(axis=1, keepdims=True)
    saver = kdist.callbacks.ShardedCheckpoint(checkpoints, every_steps=10, resume=True)
    history = model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[saver]).history
    print(f"{len(devices)} devices, loss {history['loss'][-1]:.6f}", flush=True)
    return float(history["loss"][-1])


if __name__ == "__main__":
    main(sys.argv[1])
