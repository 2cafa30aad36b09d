"""Parts that are served for any number of rows, each of any length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist.runtime import by_shape

import keras
import numpy as np
import pytest
import tensorflow as tf

from .exports import CUT, PIPELINE, mixed
from .test_pieces import LAYOUTS, close, recurrent

INNER: dict[str, int] = {"data": 2, "model": 2}
STAGES: dict[str, int] = {"pipe": 2, "model": 2}
POSITIONS = 8


class Positions(keras.layers.Layer):
    """Adds a vector per position, of which there are few."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(POSITIONS, shape[-1]), name="table")

    def call(self, x: Any) -> Any:
        return x + self.table[: keras.ops.shape(x)[1]]


def words(declare: Callable[[Any], Any] = lambda table: None, *more: Any) -> keras.Model:
    """A table, of which rows are looked up by words alone."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((None,), dtype="int32")
    table = keras.layers.Embedding(24, 4, name="table")
    declare(table)
    x = table(ids)
    for layer in more:
        x = layer(x)
    x = keras.layers.Dense(16, "relu", name="up")(x)
    return keras.Model(ids, keras.layers.Dense(6, name="down")(x))


def on_host(table: Any) -> None:
    kdist.place(table, "host")


def rows_over(axis: str) -> Callable[[Any], Any]:
    return lambda table: kdist.shard(table, manual_split=(5, 19), axis=axis)


def attending() -> keras.Model:
    """Words that look at each other, but for those of padding."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(24, 8, mask_zero=True, name="table")(ids)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4)(x, x))
    x = x + keras.layers.Dense(8, name="down")(keras.layers.Dense(16, "gelu", name="up")(x))
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Dropout(0.1)(x))
    return keras.Model(ids, keras.layers.Dense(6, name="head")(pooled))


CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, int], dict[str, Any]]] = {
    "host": (lambda: words(on_host), INNER, {}),
    "rows": (lambda: words(rows_over("model")), INNER, {}),
    "rows_data": (lambda: words(rows_over("data")), INNER, {}),
    "stages": (lambda: words(on_host), STAGES, {"pipeline": PIPELINE}),
    "positions": (lambda: words(lambda table: None, Positions()), INNER, {}),
}
DEFAULT = ("rows", "positions")


@pytest.mark.filterwarnings("error:.*rows of a batch meet")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in DEFAULT)) for n in CASES]
)
def test_any_length(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program, not piece by piece."""
    monkeypatch.delattr(by_shape, "in_pieces")
    build, axes, options = CASES[name]
    plain, model = build(), build()
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=CUT, **options)
    kdist.parallelize(model, config)
    kdist.export.saved_model(model, tmp_path / "served", shards="keep")
    served = tf.saved_model.load(str(tmp_path / "served"))
    draw = np.random.default_rng(0)
    for rows, length in ((3, 5), (1, 1), (11, POSITIONS), (70, 2)):
        x = draw.integers(0, 24, (rows, length)).astype("int32")
        close(served.serve(x), plain(x))
    if name == "positions":
        with pytest.raises(tf.errors.InvalidArgumentError):
            served.serve(np.zeros((2, POSITIONS + 1), "int32"))


MESHES: dict[str, dict[str, Any]] = {
    "data4": {"axes": {"data": 4}},
    "inner": {"axes": INNER, "layout_map": CUT},
    "stages": {"axes": {"pipe": 2, "data": 2}, "pipeline": PIPELINE},
}
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
LEVELS = [
    *((mesh, level, policy) for mesh in MESHES for level in (1, 2, 3) for policy in POLICIES[:2]),
    ("inner", 3, "mixed_float16"),
]
SEEN = ("inner", 3, "mixed_bfloat16")


@pytest.mark.filterwarnings("error:.*rows of a batch meet")
@pytest.mark.parametrize(
    ("mesh", "level", "policy"),
    [
        pytest.param(*one, marks=pytest.mark.wide if one == SEEN else pytest.mark.long)
        for one in LEVELS
    ],
)
def test_any_length_at_levels_and_in_half_precision(
    mesh: str, level: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After training, by one program; half precision is as near float32 as a plain model's is."""
    monkeypatch.delattr(by_shape, "in_pieces")
    model, half = (mixed(policy, attending) for _ in range(2))
    plain = attending()
    options = dict(MESHES[mesh])
    shards = kdist.OptimizerConfig(level=level, threshold_kb=0)
    at = kdist.mesh(**options.pop("axes"))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=at, optimizer=shards, **options))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    draw = np.random.default_rng(0)
    model.train_on_batch(draw.integers(1, 24, (8, 5)), draw.normal(size=(8, 6)))
    for one in (plain, half):
        one.set_weights(model.get_weights())
    kdist.export.saved_model(model, tmp_path / "served", shards="keep")
    served = tf.saved_model.load(str(tmp_path / "served"))
    off: dict[str, list[Any]] = {"served": [], "half": []}
    for rows, length in ((3, 5), (1, 1), (11, 8), (70, 2), (2, 33)):
        x = draw.integers(1, 24, (rows, length)).astype("int32")
        x[0, 1:] = 0
        expected, found, rounded = plain(x), served.serve(x), half(x)
        assert found.dtype == rounded.dtype and found.shape == rounded.shape
        if policy == "float32":
            close(found, expected)
        off["served"].append(tf.cast(found, "float32") - expected)
        off["half"].append(tf.cast(rounded, "float32") - expected)
    far = {name: float(np.std(np.concatenate(values))) for name, values in off.items()}
    assert policy == "float32" or 0 < far["served"] < 1.5 * far["half"] < 0.02, far


@pytest.mark.long
def test_lengths_of_a_loop_by_signature(tmp_path: Path) -> None:
    """Where one program does not serve all lengths, there may be one for each."""
    keras.utils.set_random_seed(2)
    model, plain = recurrent(None), recurrent(None)
    plain.set_weights(model.get_weights())
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**INNER), **LAYOUTS))
    lengths = {f"of_{n}": kdist.export.Signature([tf.TensorSpec([None, n, 8])]) for n in (3, 5)}
    kdist.export.saved_model(model, tmp_path / "served", lengths, shards="keep")
    served = tf.saved_model.load(str(tmp_path / "served"))
    for rows, length in ((1, 3), (11, 5)):
        x = np.random.default_rng(rows).normal(size=(rows, length, 8)).astype("float32")
        close(getattr(served, f"of_{length}")(x), plain(x))
