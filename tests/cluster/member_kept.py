"""What the processes of the tests of what goes on from checkpoints run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import warnings
from typing import Any

import kdist

import keras
import numpy as np
import tensorflow as tf
from member import data, joined, model
from stopping import StopAfter, Stopped


def reads_again() -> None:
    """Trains on a dataset that both processes read, whole, and stopped within an epoch twice."""
    joined()
    x, y = data()

    def run(name: str, steps: int = -1) -> Any:
        folder = f"{os.environ['TEST_FOLDER']}/{name}"
        saver = kdist.callbacks.ShardedCheckpoint(folder, every_steps=3, resume=True)
        made = model()
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=5).batch(8)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with contextlib.suppress(Stopped):
                calls = [saver, StopAfter(steps)]
                losses = made.fit(rows, epochs=3, verbose=0, callbacks=calls).history["loss"]
                lines = sum("position in this tf.data" in str(one.message) for one in told)
                assert lines == 1, [str(one.message) for one in told]
                step = saver.restored and saver.restored.step
                return losses, [w.tolist() for w in made.get_weights()], step
        return None

    *whole, _ = run("whole")
    assert run("stopped", 7) is None  # four steps are an epoch
    *found, step = run("stopped")
    print("RESULT " + json.dumps({"equal": found == whole, "step": step}), flush=True)


def moves() -> None:
    """Trains on a dataset, by epochs and by steps; stops within an epoch, or goes on and ends."""
    joined()
    x, y = data()
    found = {}
    for name, more in (("epochs", {}), ("steps", {"steps_per_epoch": 5})):
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=5)
        rows = (rows.repeat() if more else rows).batch(8)
        folder = f"{os.environ['TEST_FOLDER']}/{name}"
        saver = kdist.callbacks.ShardedCheckpoint(folder, every_steps=1, resume=True)
        calls = [saver, StopAfter(int(os.environ.get("TEST_STOP", "-1")))]
        with contextlib.suppress(Stopped):
            made = model()
            losses = made.fit(rows, epochs=3, verbose=0, callbacks=calls, **more).history["loss"]
            step = saver.restored and saver.restored.step
            found[name] = {"step": step, "loss": losses}
    print("RESULT " + json.dumps(found), flush=True)


def survives() -> None:
    """Trains with checkpoints; prints each step's number and loss, and what is saved."""
    joined()
    made, (x, y) = model(), data()
    folder = os.environ["TEST_FOLDER"]

    class Telling(keras.callbacks.Callback):
        """Tells a test of each step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            saved = kdist.checkpoint.latest(folder)
            said = [int(self.model.optimizer.iterations), logs["loss"], saved and saved.name]
            print("STEP " + json.dumps(said), flush=True)

    saver = kdist.callbacks.ShardedCheckpoint(folder, every_steps=2, resume=True)
    calls = [Telling(), saver]
    epochs = int(os.environ["TEST_EPOCHS"])
    history = made.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=calls).history
    weights = [w.tolist() for w in made.get_weights()]
    print("RESULT " + json.dumps({"loss": history["loss"], "weights": weights}), flush=True)


def large_model() -> keras.Model:
    """A stack of equal layers, not compiled."""
    width, layers = int(os.environ["TEST_WIDTH"]), int(os.environ["TEST_LAYERS"])
    keras.utils.set_random_seed(3)
    stack = [keras.layers.Dense(width, activation="tanh") for _ in range(layers)]
    return keras.Sequential([keras.Input((width,)), *stack])


def little_memory() -> None:
    """Trains and saves a model of more bytes than the process may have; resumes if it can."""
    bound = int(os.environ["TEST_BYTES"])
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    joined(threads_per_op=1)  # several round otherwise from run to run
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=int(os.environ["KDIST_NUM_PROCESSES"])),
        optimizer=kdist.OptimizerConfig(level=3),
    )
    if os.environ.get("TEST_WHOLE"):
        made = kdist.parallelize(large_model(), config)
    else:
        with kdist.scope(config):
            made = large_model()
    held = 4 * made.count_params()
    print("HELD", held, flush=True)
    assert bound <= held
    made.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(32, made.input_shape[-1])).astype("float32")
    saver = kdist.callbacks.ShardedCheckpoint(
        os.environ["TEST_FOLDER"], every_steps=2, asynchronous=False, resume=True
    )
    stops = int(os.environ.get("TEST_STOP", "-1"))

    class Ending(keras.callbacks.Callback):
        """Ends the program within the epoch."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print("STEP", int(self.model.optimizer.iterations), flush=True)
            if int(self.model.optimizer.iterations) == stops:
                sys.exit(0)

    history = made.fit(x, x, batch_size=8, verbose=0, callbacks=[saver, Ending()]).history
    print("RESULT " + json.dumps(history["loss"]), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
