"""Batches of many shapes over inner axes, with tables on the host or split by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

from .test_shapes import ATTENTION, WIDTH, WORDS, Counts, counts, epochs, pair, text, text_model

pytestmark = pytest.mark.usefixtures("float64")
__all__ = ["counts"]
SHAPES = [(4 + length % 5, length) for length in range(6, 26, 2)]


def bare() -> keras.Model:
    """Of its ids nothing but their number is left once rows are looked up; twice in one table."""
    words = keras.Input((None,), dtype="int32", name="words")
    table = layers.Embedding(WORDS, WIDTH, name="table")
    x = layers.Concatenate(name="both")([table(words), table((words + 1) % WORDS)])
    x = layers.Dense(16, "tanh", name="up")(x)
    return keras.Model(words, layers.Dense(WORDS, name="head")(x))


def text_of(model: Callable[[], keras.Model], declare: Callable[[Any], Any]) -> Any:
    def build() -> keras.Model:
        made = model()
        declare(made.get_layer("table"))
        return made

    return build


def on_host(table: Any) -> None:
    kdist.place(table, "host")


def ahead(table: Any) -> None:
    kdist.place(table, "host", prefetch=True)


def rows_over(axis: str) -> Callable[[Any], Any]:
    return lambda table: kdist.shard(table, manual_split=(WORDS - 7, 7), axis=axis)


STAGES = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
SHARDS = {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, int]]] = {
    "bare": (bare, on_host, {}, {}),
    "host": (text_model, on_host, {}, {}),
    "ahead": (bare, ahead, {}, {}),
    "rows": (text_model, rows_over("model"), {}, {}),
    "rows_data": (bare, rows_over("data"), SHARDS, {}),
    "stages": (bare, on_host, STAGES, {"pipe": 2, "model": 2}),
}
DEFAULT = ("bare",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in DEFAULT)) for n in CASES]
)
def test_tables_and_many_lengths(counts: Counts, name: str) -> None:
    build, declare, options, axes = CASES[name]
    cut = ATTENTION if build is text_model else {"up/kernel": (None, "model")}
    models = pair(text_of(build, declare), cut, options, **axes)
    epochs(text, SHAPES, counts, models, 6)
    for rows, length in ((5, 31), (9, 2)):
        x, _ = text(rows, length)
        found, expected = (model.predict(x, verbose=0) for model in reversed(models))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
