"""Runs of `fit` that are stopped and go on, and what is seen of them."""

from __future__ import annotations

import contextlib
from typing import Any

import kdist

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf
import tensorstore as ts

from ..cluster.stopping import StopAfter, Stopped

ROWS, BATCH = 44, 8
"""Six batches an epoch, the last one smaller."""

STEPS = -(-ROWS // BATCH)
LAYOUTS = {"up/kernel": (None, "model"), "up/bias": ("model",)}


def bytes_read() -> int:
    """Bytes that this process has read from files by TensorStore so far."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


class Seen(keras.callbacks.Callback):
    """Notes every step: its number, the logs, the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        rate = float(self.model.optimizer.learning_rate)
        self.steps.append([batch, float(logs["loss"]), float(logs["mae"]), rate])


def arrays():
    """Inputs and what to predict."""
    draw = np.random.default_rng(3)
    return draw.normal(size=(ROWS, 6)), draw.normal(size=(ROWS, 3))


class Batches(keras.utils.PyDataset):
    """The arrays, batch by batch."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(one[rows] for one in arrays())


def generate():
    """The arrays without end."""
    while True:
        yield from (Batches()[n] for n in range(STEPS))


def dataset(how: str) -> tf.data.Dataset:
    """The arrays, shuffled anew each epoch; "unknown" with a length that nobody knows."""
    made = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=5)
    if how == "unknown":
        made = made.filter(lambda x, y: True)
    if how == "python":
        made = made.map(
            lambda x, y: (tf.ensure_shape(tf.py_function(lambda t: t, [x], x.dtype), [6]), y)
        )
    if how == "repeated":
        made = made.repeat()
    return made.batch(BATCH).prefetch(2)


def source(kind: str) -> dict[str, Any]:
    """Arguments of `fit` that say what to train on."""
    x, y = arrays()
    return {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
        "weighted": lambda: {
            "x": x,
            "y": y,
            "sample_weight": np.linspace(0.5, 1.5, ROWS),
            "batch_size": BATCH,
            "shuffle": "batch",
        },
        "split": lambda: {"x": x, "y": y, "batch_size": BATCH, "validation_split": 0.2},
        "endless": lambda: {"x": x, "y": y, "batch_size": BATCH, "steps_per_epoch": 5},
        "sparse": lambda: {"x": scipy.sparse.csr_matrix(x), "y": y, "batch_size": BATCH},
        "sparse_split": lambda: {
            "x": tf.sparse.from_dense(x),
            "y": y,
            "batch_size": BATCH,
            "validation_split": 0.2,
        },
        "batches": lambda: {"x": Batches()},
        "batches_in_order": lambda: {"x": Batches(), "shuffle": False},
        "cut": lambda: {"x": Batches(), "steps_per_epoch": 5},
        "workers": lambda: {"x": Batches(workers=2)},
        "dataset": lambda: {"x": dataset("known")},
        "classes": lambda: {"x": dataset("known"), "class_weight": {0: 0.5, 1: 1.0, 2: 2.0}},
        "unknown": lambda: {"x": dataset("unknown")},
        "python": lambda: {"x": dataset("python")},
        "repeated": lambda: {"x": dataset("repeated"), "steps_per_epoch": 5},
        "generator": lambda: {"x": generate(), "steps_per_epoch": STEPS},
    }[kind]()


def callbacks() -> list[keras.callbacks.Callback]:
    """Keras's callbacks that remember something."""
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10),
        keras.callbacks.EarlyStopping(monitor="mae", patience=9, restore_best_weights=True),
    ]


def build(mesh: dict[str, int] | None, level: int, **compile_options: Any) -> keras.Model:
    """A model with dropout and statistics; without a mesh, a plain one."""
    keras.utils.set_random_seed(21)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="up")(inputs)
    x = keras.layers.Dropout(0.3, name="drop")(x)
    x = keras.layers.BatchNormalization(name="statistics")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="head")(x))
    if mesh is not None:
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**mesh),
            layout_map=LAYOUTS if "model" in mesh else None,
            optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        )
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"], **compile_options)
    return model


def run(
    model: keras.Model,
    saver: kdist.callbacks.ShardedCheckpoint | None,
    kind: str,
    stop: int | None = None,
    epochs: int = 3,
    also: Any = (),
) -> dict[str, Any]:
    """One run; what is seen of it, if it ends."""
    seen = Seen()
    saving = [] if saver is None else [saver]
    rest = [StopAfter(stop)] if stop else []
    with contextlib.suppress(Stopped):
        history = model.fit(
            **source(kind),
            epochs=epochs,
            verbose=0,
            callbacks=[*callbacks(), *also, seen, *saving, *rest],
        )
        return {
            "history": history.history,
            "epochs": history.epoch,
            "steps": seen.steps,
            "weights": [w.numpy() for w in model.weights],
        }
    return {"steps": seen.steps}
