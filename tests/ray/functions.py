"""What the workers of these tests run; sent to them whole, since they cannot import tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import ray.train
import tensorflow as tf

ROWS, BATCH, EPOCHS = 32, 8, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 12)), rng.normal(size=(ROWS, 4))


def model(devices: int) -> keras.Model:
    """A model over all devices of all workers."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)]
    made = keras.Sequential([keras.Input((12,)), *layers])
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=devices), optimizer=kdist.OptimizerConfig(level=1, threshold_kb=0)
    )
    kdist.parallelize(made, config)
    made.compile(keras.optimizers.Adam(0.01), "mse")
    return made


def result(made: keras.Model, history: Any) -> dict[str, Any]:
    return {"loss": history.history["loss"], "weights": made.get_weights()}


def alone(**given: Any) -> dict[str, Any]:
    """What a run gives that is never broken, in one process with the devices of two."""
    made, (x, y) = model(4), data()
    return result(made, made.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, **given))


def trains(config: dict[str, Any]) -> dict[str, Any]:
    """Trains with checkpoints; in the first attempt, something ends in the middle of an epoch.

    `kill` is the rank whose process gets the signal `how`; with `wait`, a test is told by a file,
    and has ended something when there is another.
    """
    folder = Path(config["folder"])
    rank, count = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with (folder / f"starts-{rank}").open("a") as starts:
        starts.write(f"{count}\n")
    kdist.init(cpu_devices=2, start_timeout_s=60, peer_timeout_s=8)
    assert rank == 0, "the function goes on in the first worker only"
    made, (x, y) = model(2 * count), data()

    class Ending(keras.callbacks.Callback):
        """Notes where training goes on; ends something in the middle of an epoch."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            step = int(self.model.optimizer.iterations)
            with (folder / "steps").open("a") as steps:
                steps.write(f"{step}\n")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            first = len((folder / "starts-0").read_text().split()) == 1
            if not first or self.model.optimizer.iterations != 7:
                return
            if "kill" in config:
                pid = int((folder / f"pid-{config['kill']}").read_text())
                os.kill(pid, config["how"])
            if "wait" in config:
                (folder / "waiting").touch()
                while not (folder / "done").exists():
                    time.sleep(0.1)

    callbacks = [kdist.ray.ShardedCheckpoint(every_steps=2), kdist.ray.Report(), Ending()]
    fitted = made.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    ray.train.collective.barrier()
    return result(made, fitted)


def raises() -> None:
    """Fails in Python."""
    kdist.init(cpu_devices=2)
    raise KeyError("of the user")


def trains_apart() -> None:
    """Forgets `kdist.init`."""


def from_ray_data() -> dict[str, Any]:
    """Trains on the rows of a Ray dataset."""
    kdist.init(cpu_devices=2)
    rows = ray.train.get_dataset_shard("train")
    batches = rows.to_tf("x", "y", batch_size=BATCH)
    # Else Keras finds the end by a step that fails, and counts it.
    batches = batches.apply(tf.data.experimental.assert_cardinality(ROWS // BATCH))
    made = model(4)
    return result(made, made.fit(batches, epochs=EPOCHS, verbose=0))
