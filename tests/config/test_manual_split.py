"""What `kdist.shard(..., manual_split=...)` takes."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest


def parallel(layer: keras.layers.Layer, **axes: int) -> keras.Model:
    tokens = keras.Input((3,), dtype="int32")
    model = keras.Model(tokens, keras.layers.Flatten()(layer(tokens)))
    return kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes)))


def table(rows: int = 10, **options: Any) -> keras.layers.Layer:
    return keras.layers.Embedding(rows, 2, name="table", **options)


def test_another_number_of_rows_names_both() -> None:
    layer = kdist.shard(table(), manual_split=(3, 4))
    with pytest.raises(ValueError, match=r"whole table: 10 rows. Received: 7 rows, rows=\(3, 4\)"):
        parallel(layer, model=2)


def test_another_number_of_devices_names_both() -> None:
    layer = kdist.shard(table(), manual_split=(3, 7))
    with pytest.raises(ValueError, match="devices: 4 on 'model'. Received: 2 parts"):
        parallel(layer, model=4)


def test_an_axis_that_the_mesh_has_not() -> None:
    layer = kdist.shard(table(), manual_split=(3, 7), axis="expert")
    with pytest.raises(ValueError, match="no axis 'expert'"):
        parallel(layer, model=2)


@pytest.mark.parametrize("rows", [(), (3, -1), (3, 2.5), "ab"])
def test_no_rows(rows: Any) -> None:
    with pytest.raises(ValueError, match="integers from 0 on"):
        kdist.shard(table(), manual_split=rows)


def test_local_columns_need_rows_in_each_part() -> None:
    with pytest.raises(ValueError, match=r"so each has rows.*Received: rows=\(0, 10\)"):
        kdist.shard(table(), manual_split=(0, 10), local_columns=True)
    with pytest.raises(ValueError, match="Received: local_columns='yes'"):
        kdist.shard(table(), manual_split=(3, 7), local_columns="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="local_columns is of manual_split"):
        kdist.shard(table(), weights={"embeddings": ("model", None)}, local_columns=True)


def test_alone() -> None:
    with pytest.raises(ValueError, match="stands alone"):
        kdist.shard(table(), manual_split=(3, 7), weights={"embeddings": ("model", None)})
    with pytest.raises(ValueError, match="axis is of manual_split"):
        kdist.shard(table(), weights={"embeddings": ("model", None)}, axis="data")


def test_not_on_the_host_too() -> None:
    layer = kdist.shard(kdist.place(table()), manual_split=(3, 7))
    with pytest.raises(ValueError, match="on the host or split over devices, not both"):
        parallel(layer, model=2)


def test_no_embedding() -> None:
    with pytest.raises(ValueError, match="can be split by hand.*type Dense"):
        kdist.shard(keras.layers.Dense(3), manual_split=(3, 7))
