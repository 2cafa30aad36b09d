"""Epochs with and without `prefetch=True`, where looking up and computing each wait.

    python benchmarks/look_ups_ahead.py
    python benchmarks/look_ups_ahead.py --compute=0.1    # seconds

Both waits are asleep, as a processor is while a memory far away, or a device, works: what is
measured is the order of things, and not two processors doing the work of three. Epochs of both
are timed in turn.
"""

from __future__ import annotations

import time
from typing import Any

import kdist

import keras
import numpy as np
import results_file
import tensorflow as tf
from absl import app, flags
from rich.console import Console

FLAGS = flags.FLAGS
ROWS, WIDTH, BATCH = 40, 4, 4


def waits(values: Any, seconds: float) -> Any:
    """Values, some seconds later."""

    def wait(x: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return x

    slow = tf.numpy_function(wait, [values], values.dtype, stateful=False)
    slow.set_shape(values.shape)
    return slow


class SlowIds(keras.layers.Layer):
    """Takes its time to say which rows are looked up, as a memory far away does."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="slow_ids")
        self.seconds = seconds

    def call(self, ids: Any) -> Any:
        """The ids."""
        return waits(ids, self.seconds)


class SlowCompute(keras.layers.Layer):
    """Takes its time to compute, as a device with a processor of its own does."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="slow_compute")
        self.seconds = seconds

    def call(self, x: Any) -> Any:
        """Its operand."""
        return tf.custom_gradient(lambda x: (waits(x, self.seconds), lambda g: g))(x)


def built(
    prefetch: bool, steps: int, look_up: float, compute: float, optimizer: Any = "sgd"
) -> keras.Model:
    """A compiled model; `steps` are one execution, the others are in seconds."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((3,), dtype="int32")
    table = kdist.layers.HostEmbedding(ROWS, WIDTH, name="table", prefetch=prefetch)
    x = SlowCompute(compute)(keras.layers.Flatten()(table(SlowIds(look_up)(ids))))
    model = keras.Model(ids, keras.layers.Dense(2)(x))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=1)))
    model.compile(optimizer, "mse", steps_per_execution=steps)
    return model


def batches(steps: int) -> tf.data.Dataset:
    """An epoch."""
    ids = np.random.default_rng(0).integers(0, ROWS, (BATCH * steps, 3)).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones((BATCH * steps, 2))))
    return data.batch(BATCH, drop_remainder=True)


def main(_: list[str]) -> None:
    """Times both, prints a line, writes a file."""
    kdist.init(cpu_devices=2)
    data = batches(FLAGS.steps)
    waiting = (FLAGS.look_up, FLAGS.compute)
    models = {ahead: built(ahead, FLAGS.steps, *waiting) for ahead in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    for epoch in range(FLAGS.epochs + 1):
        for ahead, model in models.items():
            start = time.perf_counter()
            model.fit(data, verbose=0)
            if epoch:
                times[ahead].append((time.perf_counter() - start) / FLAGS.steps)
    ratios = [a / b for a, b in zip(times[False], times[True], strict=True)]
    row = {
        "without": results_file.spread_of(times[False]),
        "ahead": results_file.spread_of(times[True]),
        "faster": results_file.spread_of(ratios),
    }
    slow, fast = (1e3 * row[name]["median"] for name in ("without", "ahead"))
    faster = row["faster"]["median"]
    Console().print(f"a step: {slow:.1f} ms, ahead {fast:.1f} ms, {faster:.2f} x as fast")
    settings = {name: FLAGS[name].value for name in ("look_up", "compute", "steps", "epochs")}
    print(results_file.save("look_ups_ahead", settings, [row], keep=FLAGS.keep))


if __name__ == "__main__":
    flags.DEFINE_float("look_up", 0.04, "seconds that a look-up waits")
    flags.DEFINE_float("compute", 0.04, "seconds that the model waits")
    flags.DEFINE_integer("steps", 16, "of an epoch, which is one execution")
    flags.DEFINE_integer("epochs", 5, "that are timed")
    flags.DEFINE_bool("keep", False, "write the tracked file of results")
    app.run(main)
