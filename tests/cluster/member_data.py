"""What the processes of the tests of datasets run."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import kdist
from kdist.runtime.worker_data import WorkerIterator

import keras
import tensorflow as tf
from member import joined, model


def datasets(folder: Path) -> dict[str, Any]:
    """Datasets over files: each element is read, parsed and shuffled; ends are uneven."""
    files = sorted(str(one) for one in folder.glob("rows-*"))

    def rows(line: Any) -> Any:
        numbers = tf.strings.to_number(tf.strings.split(line, ","), tf.float64)
        return tf.reshape(numbers, (16,))[:12], tf.reshape(numbers, (16,))[12:]

    lines = tf.data.TextLineDataset(files)
    parsed = lines.map(rows, num_parallel_calls=2)
    python = lines.map(lambda line: tf.py_function(rows, [line], [tf.float64] * 2)).map(
        lambda x, y: (tf.ensure_shape(x, (12,)), tf.ensure_shape(y, (4,)))
    )
    shuffled = parsed.shuffle(50, seed=4)
    columns = shuffled.map(lambda x, y: x), shuffled.map(lambda x, y: y)
    counted = parsed.apply(tf.data.experimental.assert_cardinality(45))
    each = tf.data.Dataset.list_files(str(folder / "row-*"), shuffle=True, seed=5)
    of_files = tf.data.Dataset.list_files(str(folder / "rows-*"), shuffle=True, seed=5)
    by_file = of_files.interleave(tf.data.TextLineDataset, cycle_length=2).map(rows)
    by_file = by_file.apply(tf.data.experimental.assert_cardinality(45)).shuffle(9, seed=2)
    one_file = tf.data.TextLineDataset(files[:1]).map(rows).batch(7)
    return {
        "by file": by_file.batch(7).with_options(own_files()),
        "one file": one_file.with_options(own_files()),
        "one file, to look at": one_file,
        "a file each": each.map(tf.io.read_file).map(rows, num_parallel_calls=2).batch(7),
        "cached": counted.shuffle(50, seed=6).cache().repeat(2).batch(7),
        "repeated": counted.shuffle(50, seed=6).repeat(2).batch(7),
        "split": shuffled.skip(8).batch(7),
        "split, to look at": shuffled.take(8).batch(7),
        "in a tuple": shuffled.skip(8).batch(7),
        "in a tuple, to look at": shuffled.take(8).batch(7),
        "columns": tf.data.Dataset.zip(columns).batch(7),
        "weighted": parsed.map(lambda x, y: (x, tf.cast(y[:1] > 0, tf.float64))).batch(7),
        "sizes": parsed.take(14)
        .batch(7)
        .concatenate(parsed.skip(14).take(10).batch(5))
        .concatenate(parsed.skip(24).batch(4)),
        "plain": parsed.batch(7),
        "seeded": parsed.shuffle(50, seed=3).batch(7),
        "unseeded": parsed.shuffle(50).batch(7),
        "full": parsed.batch(8, drop_remainder=True).repeat(),
        "python": python.batch(7),
        "loose": parsed.shuffle(50).batch(7).with_options(loose()),
    }


def own_files() -> tf.data.Options:
    """Options of a dataset of which each process reads files of its own."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return options


def loose() -> tf.data.Options:
    """Options of a dataset whose order is not known."""
    options = tf.data.Options()
    options.deterministic = False
    return options


def counted_takes() -> list[int]:
    """Grows with each batch that process 0 takes outside of a graph."""
    found: list[int] = []
    plain = WorkerIterator.take_first

    def take_first(iterator: WorkerIterator) -> Any:
        found.append(1)
        return plain(iterator)

    WorkerIterator.take_first = take_first  # type: ignore[method-assign]
    return found


class Failing(keras.callbacks.Callback):
    """Ends a start in the middle of an epoch, if that is asked for."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if "TEST_FAILS" in os.environ and self.model.optimizer.iterations == 10:
            raise RuntimeError("of the first start")


class Seen(keras.metrics.Metric):
    """The sum of all labels that a pass has seen."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.total = self.add_weight(name="total", dtype="float64", initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(y))

    def result(self) -> Any:
        return self.total


def reads() -> None:
    """Trains and evaluates on a dataset over files; says what was seen, and who reads it."""
    joined()
    folder, name = Path(os.environ["TEST_FOLDER"]), os.environ["TEST_DATA"]
    made_of = datasets(folder)
    given, whole = made_of[name], made_of.get(f"{name}, to look at", made_of["plain"])
    if name == "unseeded":
        next(iter(given))  # which draws seeds in this process alone
    made = model()
    each = int(os.environ.get("TEST_STEPS", "1"))
    made.unrolled_steps_per_execution = int(os.environ.get("TEST_TOGETHER", "1"))
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=[Seen()], steps_per_execution=each)
    calls: list[keras.callbacks.Callback] = []
    if states := os.environ.get("TEST_STATES"):
        calls = [kdist.callbacks.ShardedCheckpoint(states, every_steps=2, resume=True), Failing()]
    steps = 4 if name == "full" else None
    takes = counted_takes()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = made.fit(
            given,
            epochs=3,
            steps_per_epoch=steps,
            verbose=0,
            validation_data=(whole,) if name == "in a tuple" else whole,
            callbacks=calls,
            class_weight={0: 1.0, 1: 2.5} if name == "weighted" else None,
        ).history
        scores = made.evaluate(datasets(folder)["plain"], verbose=0)
        predicted = made.predict(datasets(folder)["plain"], verbose=0)
    found = {
        "history": history,
        "scores": scores,
        "predicted": predicted.tolist(),
        "weights": [w.tolist() for w in made.get_weights()],
        "said": [str(one.message) for one in said],
        "takes": len(takes),
        "step": int(made.optimizer.iterations),
    }
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
