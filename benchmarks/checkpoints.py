"""How long training waits for a checkpoint: the copy of its state to host memory, and what more.

    sh run.sh python benchmarks/checkpoints.py

A stack of dense layers with Adam on four CPU devices, at level 3. "copy" is NumPy's of the same
arrays, one after the other, into new memory; "snapshot" is all that `ShardedCheckpoint` does
before training goes on. Both are measured in turns, as wall and as CPU time of the process: the
latter says the same on a machine that is busy with other things. "fit, every k" is what `fit` waits
at each checkpoint but the first: the snapshot, and before it the rest of the write before, if that
takes longer than k steps. Kept with --keep: results_file.py.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import kdist
from kdist.checkpoint import snapshot
from kdist.checkpoint.keras_description import KnownPlaces

import keras
import numpy as np
import results_file
from absl import app, flags

import benchmark_paths  # noqa: F401

FLAGS = flags.FLAGS


def trained(layers: int, width: int) -> keras.Model:
    """A model after one step."""
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(width, "tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack])
    optimizer = kdist.OptimizerConfig(level=3)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=4), optimizer=optimizer))
    model.compile("adam", "mse")
    x = np.ones((4, width), "float32")
    model.train_on_batch(x, x)
    return model


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call; what it returns is freed after."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = work()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    del made
    return spent


class Timed(kdist.callbacks.ShardedCheckpoint):
    """Notes how long each step's end takes."""

    def __init__(self, every: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().__init__(self.folder.name, every_steps=every, keep=1)
        self.spent: list[tuple[float, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `kdist.callbacks.ShardedCheckpoint`."""
        self.spent.append(timed(lambda: super(Timed, self).on_train_batch_end(batch, logs)))


def waits(model: keras.Model, every: int, saves: int) -> list[tuple[float, float]]:
    """What `fit` waits at checkpoints that another came before."""
    saver, steps = Timed(every), every * saves + 1
    x = np.ones((4 * steps, FLAGS.width), "float32")
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[saver])
    saver.folder.cleanup()
    return saver.spent[2 * every - 1 : steps - 1 : every]


def main(_: Any) -> None:
    """Measures and prints."""
    kdist.init(cpu_devices=4)
    model, known = trained(FLAGS.layers, FLAGS.width), KnownPlaces()
    arrays = [values for _, values in snapshot.snapshot(model, 0, known=known).parts]
    ways = {
        "copy": lambda: [one.copy() for one in arrays],
        "snapshot": lambda: snapshot.snapshot(model, 0, known=known),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(FLAGS.rounds):
        for name, work in ways.items():
            times[name].append(timed(work))
    for every in map(int, FLAGS.every):
        times[f"fit, every {every}"] = waits(model, every, FLAGS.saves)
    print(f"{sum(one.nbytes for one in arrays) / 2**20:.0f} MiB")
    rows = []
    for name, found in times.items():
        wall, cpu = (results_file.spread_of(one) for one in zip(*found))
        rows.append({"name": name, "wall": wall, "cpu": cpu})
        print(f"{name:14s} wall {wall['min']:.3f} to {wall['max']:.3f} s, cpu {cpu['min']:.3f} s")
    settings = {name: FLAGS[name].value for name in ("layers", "width", "rounds", "every", "saves")}
    print(results_file.save("checkpoints", settings, rows, keep=FLAGS.keep))


if __name__ == "__main__":
    flags.DEFINE_integer("layers", 24, "Dense layers.")
    flags.DEFINE_integer("width", 1024, "Of each.")
    flags.DEFINE_integer("rounds", 9, "Of the copy and the snapshot.")
    flags.DEFINE_list("every", ["1", "4", "16"], "Steps from one checkpoint to the next.")
    flags.DEFINE_integer("saves", 5, "Checkpoints of each `fit`.")
    flags.DEFINE_bool("keep", False, "Keep the result: see results_file.py.")
    app.run(main)
