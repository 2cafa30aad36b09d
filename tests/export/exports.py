"""Models that are exported after parallel training, each with what a plain model gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import tensorflow as tf

WORDS = ["red", "green", "blue", "white", "black"]
CUT = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def dense() -> keras.Model:
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "relu", name="up")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(6, name="down")(keras.layers.Dropout(0.1)(x)))


def tokens(embedding: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Flatten()(embedding(inputs))
    x = keras.layers.Dense(16, "relu", name="up")(x)
    return keras.Model(inputs, keras.layers.Dense(6, name="down")(x))


def on_host() -> keras.Model:
    return tokens(kdist.layers.HostEmbedding(24, 4, name="table"))


def uneven(**options: Any) -> keras.Model:
    table = keras.layers.Embedding(24, 4, name="table")
    return tokens(kdist.shard(table, manual_split=(5, 19), axis="data", **options))


def columns() -> keras.Model:
    return tokens(kdist.layers.SplitEmbedding(24, (1, 3), axis="data", name="table"))


def whole_table() -> keras.Model:
    return tokens(keras.layers.Embedding(24, 4, name="table"))


def mixed(policy: str = "mixed_bfloat16", build: Callable[[], keras.Model] = dense) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy(before)


def lora(model: keras.Model) -> None:
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(2)


def int8(model: keras.Model) -> None:
    # Keras does not quantise layers that derive from its own, as `HostEmbedding` does.
    model.quantize("int8", filters=lambda layer: isinstance(layer, keras.layers.Dense))


@dataclasses.dataclass(frozen=True)
class Export:
    """One model to export.

    Attributes:
        axes: Of its mesh.
        build: Makes the model.
        options: Of its configuration.
        plain: Makes the same model of plain layers, if `build` does not.
        first: What is done to it before it trains.
        last: What is done to it once it has trained.
    """

    axes: dict[str, int]
    build: Callable[[], keras.Model] = dense
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    plain: Callable[[], keras.Model] | None = None
    first: Callable[[keras.Model], None] = lambda model: None
    last: Callable[[keras.Model], None] = lambda model: None


PIPELINE = kdist.PipelineConfig(micro_batches=2)
SHARDS = kdist.OptimizerConfig(level=3, threshold_kb=0)
EXPORTS = {
    "level3": Export({"data": 4}, options={"optimizer": SHARDS}),
    "inner": Export({"data": 2, "model": 2}, options={"layout_map": CUT}),
    "global": Export(
        {"data": 2, "model": 2}, options={"layout_map": CUT, "batch_semantics": "global"}
    ),
    "pipeline": Export({"pipe": 2, "model": 2}, options={"layout_map": CUT, "pipeline": PIPELINE}),
    "host": Export({"data": 2}, on_host, plain=whole_table),
    "uneven": Export({"data": 2}, uneven, plain=whole_table),
    "mixed": Export({"data": 2}, mixed),
    "lora": Export({"data": 2, "model": 2}, options={"layout_map": CUT}, first=lora),
    "int8": Export({"data": 2}, last=int8),
    "int8_level3": Export({"data": 4}, options={"optimizer": SHARDS}, last=int8),
    "int8_inner": Export({"data": 2, "model": 2}, options={"layout_map": CUT}, last=int8),
    "int8_pipeline": Export(
        {"pipe": 2, "model": 2}, options={"layout_map": CUT, "pipeline": PIPELINE}, last=int8
    ),
    "int8_tables": Export({"data": 2}, on_host, plain=whole_table, last=int8),
    "lora_level3": Export({"data": 4}, options={"optimizer": SHARDS}, first=lora),
    "lora_int8": Export(
        {"data": 2, "model": 2}, options={"layout_map": CUT}, first=lora, last=int8
    ),
}


def batch(model: keras.Model, rows: int) -> np.ndarray:
    """Rows of input, the same for the same number."""
    rng = np.random.default_rng(rows)
    if model.input.dtype == "int32":
        return rng.integers(0, 24, (rows, 6)).astype("int32")
    return rng.normal(size=(rows, 8)).astype("float32")


def trained(one: Export) -> tuple[keras.Model, keras.Model]:
    """The model after three steps over its mesh; one on a single device that is finished alike."""
    keras.utils.set_random_seed(2)
    model = one.build()
    one.first(model)
    mesh = kdist.mesh(**one.axes)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, **one.options))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = batch(model, 24)
    y = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0)
    again = (one.plain or one.build)()
    one.first(again)
    again.set_weights(model.get_weights())
    one.last(model)
    one.last(again)
    return model, again


def signatures(model: keras.Model) -> dict[str, kdist.export.Signature]:
    """The model alone, and one that reads words."""
    lookup = keras.layers.StringLookup(vocabulary=WORDS)
    lookup.build(None)

    def words(text: Any) -> Any:
        ids = lookup(text)
        if model.input.dtype == "int32":
            return tf.cast(ids, tf.int32)
        return tf.pad(tf.cast(ids, tf.float32) / 5, [[0, 0], [0, 2]])

    before = keras.layers.Lambda(words)
    before.lookup = lookup
    before.build((None, 6))
    spec = tf.TensorSpec([None, 6], tf.string, name="text")
    return {
        "serve": kdist.export.Signature(),
        "words": kdist.export.Signature([spec], before, tf.nn.softmax),
    }


ROWS = (1, 3, 8, 11)
TEXT = np.array([[WORDS[(i * j + j) % 5] for j in range(6)] for i in range(3)])


WAYS: dict[str, dict[str, Any]] = {"keep": {"shards": "keep"}, "gather": {}}
"""What becomes of weights."""
TABLE_WAYS: dict[str, dict[str, Any]] = {
    "keep_inline": {"shards": "keep", "host_tables": "inline"},
    "gather_split": {"host_tables": "split"},
}
"""The same, and otherwise of tables on the host, or split by hand."""


def write(
    folder: Path,
    name: str,
    ways: Mapping[str, dict[str, Any]] = WAYS,
    one: Export | None = None,
) -> dict[str, np.ndarray]:
    """Exports one model in some ways; what a plain model and the parallel one give, by key."""
    model, again = trained(one or EXPORTS[name])
    given = signatures(model)
    for way, how in ways.items():
        kdist.export.saved_model(model, folder / f"{name}-{way}", given, **how)
    predicted, called = {}, {}
    for rows in ROWS:
        x = batch(model, rows)
        np.save(folder / f"{name}-{rows}.npy", x)
        predicted[f"{rows}"] = model.predict(x, verbose=0, batch_size=64)
        called[f"{rows}"] = again.predict(x, verbose=0, batch_size=64)
    x = given["words"].before(TEXT)
    words = tf.nn.softmax(again.predict(x, verbose=0)).numpy()
    kept = words
    if model.compute_dtype == "bfloat16":
        # With oneDNN, TensorFlow's optimizer joins a product and its bias in a plain model's graph,
        # and rounds once there. A kept program rounds after each, as the model's own does, and
        # eager Keras.
        kept = tf.nn.softmax(model.predict(x, verbose=0)).numpy()
        np.testing.assert_array_equal(kept, tf.nn.softmax(again(x)).numpy())
    predicted["words"], called["words"] = kept, words
    return {
        f"{way}-{key}": value
        for way, how in ways.items()
        for key, value in (predicted if how.get("shards") == "keep" else called).items()
    }
