"""`placement="auto"`: small tables stay on devices, large ones are dealt, or go to the host."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.layers import DistributedEmbedding, FeatureConfig, TableConfig
from kdist.plan import auto_tables

import keras
import numpy as np
import pytest

from ..parity import assert_same_weights

SIZES = {"large": 700, "huge": 900, "small": 30}
LIMIT = 600 * 4 * 8
"""Bytes in float64, so that two of the tables are large."""


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch, float64: None) -> None:
    monkeypatch.setattr(auto_tables, "AUTO_BYTES", LIMIT)


def network(**placements: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    tables = [
        TableConfig(name, rows, 4, placement=placements.get(name, "auto"))  # type: ignore[arg-type]
        for name, rows in SIZES.items()
    ]
    features = [FeatureConfig(t.name, t, (None, 3), (None, 4)) for t in tables]
    inputs = [keras.Input((3,), dtype="int32", name=one.name) for one in features]
    rows = DistributedEmbedding(features, name="tables")(inputs)
    x = keras.layers.Dense(4, "gelu", name="up")(keras.layers.Concatenate()(rows))
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


def trained(model: keras.Model) -> keras.Model:
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    for _ in range(2):
        ids = [rng.integers(0, rows, (8, 3)).astype("int32") for rows in SIZES.values()]
        model.train_on_batch(ids, rng.normal(size=(8, 2)))
    return model


def parallel(model: keras.Model, /, **axes: int) -> keras.Model:
    layouts = {"up/kernel": (None, "model")} if "model" in axes else {}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts)
    return kdist.parallelize(model, config)


def places(model: keras.Model) -> dict[str, str]:
    """Where the tables are, by name."""
    found = {}
    for name, layer in model.get_layer("tables").tables.items():
        placement = attached(model).entries[id(layer.embeddings)].placement
        split = placement.split
        found[name] = "host" if placement.on_host else split.axis if split else "device"
    return found


@pytest.mark.parametrize(
    ("axes", "where"),
    [
        ({"data": 2}, "data"),
        ({"model": 2}, "model"),
        ({"data": 2, "model": 2}, "data"),
        ({"data": 1}, "host"),
    ],
)
def test_large_tables_are_dealt(axes: dict[str, int], where: str) -> None:
    plain = trained(network())
    model = trained(parallel(network(), **axes))
    assert places(model) == {"large": where, "huge": where, "small": "device"}
    assert_same_weights(plain, model)
    (note,) = [one for one in model.plan().notes if one.startswith("tables of 'tables'")]
    assert "'small' whole on every device" in note and "18.8 KB were dealt" in note
    assert ("on the host" if where == "host" else f"over {where!r}") in note


def test_devices_hold_about_as_much() -> None:
    model = parallel(network(), data=2)
    held = dict.fromkeys(attached(model).topology.devices, 0)
    for name in ("large", "huge"):
        entry = attached(model).entries[id(model.get_layer("tables").tables[name].embeddings)]
        for at, local in entry.locals.items():
            held[entry.device(at)] += local.shape[0] * local.shape[1]
    assert sum(held.values()) == 4 * 1600
    assert max(held.values()) <= 900 * 4  # the larger of two tables


def test_what_is_said_of_a_table_stays() -> None:
    model = network(huge="device")
    kdist.place(model.get_layer("tables").tables["large"], "device")
    assert set(places(parallel(model, data=2)).values()) == {"device"}
    model = network()
    layouts: Any = {".*huge/embeddings": ("model", None)}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=layouts)
    assert places(kdist.parallelize(model, config)) == {
        "large": "data",
        "huge": "device",
        "small": "device",
    }


def test_where_nothing_can_be_fetched_they_stay() -> None:
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), batch_semantics="global")
    assert set(places(kdist.parallelize(network(), config)).values()) == {"device"}


def test_the_limit_is_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert auto_tables.AUTO_BYTES == 256 * 2**20
    assert set(places(parallel(network(), data=2)).values()) == {"device"}
