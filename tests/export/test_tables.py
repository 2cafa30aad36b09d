"""Tables on the host, or split by hand, in files: whole beside parts, in parts beside wholes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
import tensorflow as tf

from .exports import (
    EXPORTS,
    PIPELINE,
    SHARDS,
    TABLE_WAYS,
    Export,
    batch,
    columns,
    mixed,
    on_host,
    tokens,
    trained,
    uneven,
    whole_table,
    write,
)
from .serving import compare, in_a_fresh_process

LEVEL3 = {"optimizer": SHARDS, "enable_alltoall": True}
TABLES = {
    "host": EXPORTS["host"],
    "uneven": EXPORTS["uneven"],
    "uneven_level3": Export({"data": 2}, uneven, options=LEVEL3, plain=whole_table),
    "columns": Export({"data": 2}, columns, plain=whole_table),
    "pipeline": Export(
        {"pipe": 2, "data": 2}, uneven, options={"pipeline": PIPELINE}, plain=whole_table
    ),
    "host_int8": EXPORTS["int8_tables"],
    "mixed": Export(
        {"data": 2},
        functools.partial(mixed, build=uneven),
        plain=functools.partial(mixed, build=whole_table),
    ),
}
PARTS = {"host": [[24, 4]], "columns": [[24, 1], [24, 3]]}
"""Shapes of the parts of a table; otherwise those of 5 and of 19 rows."""


def check(folder: Path, names: Sequence[str]) -> None:
    """Exports models, serves them, and compares; each table is whole or in parts, as asked."""
    expected = {name: write(folder, name, TABLE_WAYS, TABLES[name]) for name in names}
    in_a_fresh_process(folder, [f"{name}-{way}" for name in names for way in TABLE_WAYS])
    for name in names:
        parts, whole = PARTS.get(name.split("_")[0], [[5, 4], [19, 4]]), [[24, 4]]
        for way, there, gone in (("keep_inline", whole, parts), ("gather_split", parts, whole)):
            where = compare(folder, name, way, expected[name])
            shapes = [shape for _, shape in where]
            assert [shapes.count(one) for one in there] == [1] * len(there), (name, way, where)
            assert there == gone or not any(one in shapes for one in gone), (name, way, where)
            assert len({at for at, _ in where}) == 1 or way == "keep_inline"


def test_served_whole_beside_parts_and_in_parts_beside_wholes(tmp_path: Path) -> None:
    check(tmp_path, ["uneven"])


@pytest.mark.long
def test_every_kind_of_table(tmp_path: Path) -> None:
    check(tmp_path, list(TABLES))


class Fields(keras.layers.Layer):
    """Ids of a small range in each of two columns, as `local_columns` wants them."""

    def call(self, x: Any) -> Any:
        return tf.stack([x[:, 0] % 5, 5 + x[:, 1] % 19], 1)


def by_columns(table: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Flatten()(table(Fields()(inputs)))
    return keras.Model(inputs, keras.layers.Dense(6, name="down")(x))


def test_local_columns_and_inner_axes(tmp_path: Path) -> None:
    """Columns of ids for each part; look-ups over an inner axis, for sizes that are known."""
    split = functools.partial(kdist.layers.SplitEmbedding, (5, 19), 4, "model", name="table")
    plain = functools.partial(keras.layers.Embedding, 24, 4, name="table")
    for number, make in enumerate((by_columns, tokens)):
        one = Export(
            {"data": 2, "model": 2},
            lambda make=make, n=number: make(split(local_columns=n == 0)),
            plain=lambda make=make: make(plain()),
        )
        model, again = trained(one)
        x = batch(model, 8)
        for way, how in TABLE_WAYS.items():
            given = {"serve": kdist.export.Signature([tf.TensorSpec([8, 6], tf.int32)])}
            kdist.export.saved_model(model, tmp_path / f"{number}-{way}", given, **how)
            served = tf.saved_model.load(str(tmp_path / f"{number}-{way}"))
            np.testing.assert_allclose(served.serve(x), again(x), rtol=1e-6, atol=1e-6)
        model.train_on_batch(x, np.ones((8, 6), "float32"))  # as it was: nothing is left behind


def test_vocabularies_inside_and_ids_of_no_row(tmp_path: Path) -> None:
    """A layer's own table of words goes into the file; an id of no row is an error there too."""
    inputs = keras.Input((6,), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=["red", "green"], name="words")(inputs)
    table = kdist.layers.SplitEmbedding((2, 1), 4, "data", name="table")
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(table(ids)))
    model = keras.Model(inputs, outputs)
    expected = model(tf.constant([["red", "blue", "green"] * 2]))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    kdist.export.saved_model(model, tmp_path / "served", host_tables="split")
    served = tf.saved_model.load(str(tmp_path / "served"))
    found = served.serve(tf.constant([["red", "blue", "green"] * 2]))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    model, _ = trained(Export({"data": 2}, uneven, plain=whole_table))
    kdist.export.saved_model(model, tmp_path / "ids", host_tables="split")
    served = tf.saved_model.load(str(tmp_path / "ids"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have a row"):
        served.serve(tf.fill([1, 6], 24))


def test_no_other_weight_is_put_together(tmp_path: Path) -> None:
    """Parts stay apart on the way into the file too, and only tables are joined if asked."""
    model, _ = trained(TABLES["uneven_level3"])
    entries = attached(model).entries.values()
    put: list[str] = []
    for entry in entries:

        def whole(entry: Any = entry, real: Any = entry.whole) -> Any:
            put.append(entry.variable.name)
            return real()

        entry.whole = whole
    kdist.export.saved_model(model, tmp_path / "keep", shards="keep", host_tables="inline")
    assert put == ["embeddings"]
    put.clear()
    kdist.export.saved_model(model, tmp_path / "gather", host_tables="split")
    assert put and "embeddings" not in put


def test_before_the_model_has_run(tmp_path: Path) -> None:
    model = on_host()
    expected = model(batch(model, 3))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    for way, how in TABLE_WAYS.items():
        kdist.export.saved_model(model, tmp_path / way, **how)
        served = tf.saved_model.load(str(tmp_path / way))
        np.testing.assert_allclose(served.serve(batch(model, 3)), expected, rtol=1e-6, atol=1e-6)
