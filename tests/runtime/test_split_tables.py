"""What devices hold, and send, of a table that is split by hand."""

from __future__ import annotations

import kdist
from kdist.api.parallelize import attached
from kdist.graphs import executed

import keras
import numpy as np
import pytest

ROWS, WIDTH, BATCH = (3000, 7000), 8, 8
MESHES = {
    "data": {"data": 2},
    "model": {"model": 2},
    "data_of_two": {"data": 2, "model": 2},
    "model_of_two": {"data": 2, "model": 2},
}


@pytest.mark.parametrize("where", MESHES)
def test_parts_are_as_declared_and_rows_travel_as_planned(where: str) -> None:
    axis, axes = where.removesuffix("_of_two"), MESHES[where]
    tokens = keras.Input((6,), dtype="int32")
    x = kdist.layers.SplitEmbedding(rows=ROWS, dim=WIDTH, axis=axis, name="table")(tokens)
    x = keras.layers.Dense(8, name="up")(keras.layers.Flatten()(x))
    model = keras.Model(tokens, keras.layers.Dense(1, name="head")(x))
    layouts = {"up/kernel": (None, "model")} if "model" in axes else {}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts)
    kdist.parallelize(model, config).compile("adam", "mse")
    rng = np.random.default_rng(0)
    data = rng.integers(0, sum(ROWS), (BATCH, 6)).astype("int32"), rng.normal(size=(BATCH, 1))
    step = executed.largest(executed.watch(lambda: model.train_on_batch(*data)))
    entry = attached(model).entries[id(model.get_layer("table").embeddings)]
    topology = attached(model).topology
    for (s, k), local in entry.locals.items():
        part = s if axis == "data" else k
        assert tuple(local.shape) == (ROWS[part], WIDTH)
    assert len(entry.locals) == len(topology.devices)
    # Nothing of the size of another part, or of the table, is made anywhere.
    for node in step.nodes:
        if node.shape and node.shape[0] in (*ROWS, sum(ROWS)):
            part = ROWS.index(node.shape[0])
            holders = {entry.device(at) for at in entry.placement.shards[part].holders}
            assert node.device in holders
    (planned,) = model.plan().split_tables()
    rows = [t for t in step.transfers if t.op == "ResourceGather"]
    slices, devices = len(topology.slices), topology.inner_size
    assert len(rows) == slices * devices
    asked = devices - 1 if axis == "model" else 2 * devices - 1
    assert planned.messages == len(rows) + slices * asked
    assert "split by hand" in str(model.plan())


def test_saved_and_loaded(tmp_path: object) -> None:
    layer = kdist.layers.SplitEmbedding(rows=(3, 4), dim=2, axis="data", name="table")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer, keras.layers.Flatten()])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.save(f"{tmp_path}/model.keras")
    again = keras.saving.load_model(f"{tmp_path}/model.keras")
    assert again.get_layer("table").split_rows == (3, 4)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
