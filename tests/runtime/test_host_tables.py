"""What an executed step does with a table on the host: where it is, and what travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.graphs.executed import ASSIGNMENTS, ExecutedFunction
from kdist.report import memory

import keras
import numpy as np
import pytest

ROWS, WIDTH, BATCH = 20_000, 16, 8
TABLE = 4 * ROWS * WIDTH


def build(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    tokens = keras.Input((6,), dtype="int32")
    penalty = options.pop("penalty", None)
    x = kdist.layers.HostEmbedding(ROWS, WIDTH, name="table", embeddings_regularizer=penalty)(
        tokens
    )
    x = keras.layers.Dense(32, name="up")(keras.layers.Flatten()(x))
    model = keras.Model(tokens, keras.layers.Dense(1, name="head")(x))
    return kdist.parallelize(model, kdist.ParallelConfig(**options))


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (BATCH, 6)).astype("int32"), rng.normal(size=(BATCH, 1))


MESHES = {"data2": ({"data": 2}, 0), "data2_model2": ({"data": 2, "model": 2}, 3)}


def first_step(
    mesh: str, optimizer: Any, penalty: str | None = None
) -> tuple[keras.Model, ExecutedFunction]:
    axes, level = MESHES[mesh]
    layouts = {"up/kernel": (None, "model")} if "model" in axes else {}
    config = kdist.OptimizerConfig(level=level, **({"threshold_kb": 0} if level else {}))
    mesh_of = kdist.mesh(**axes)
    model = build(mesh=mesh_of, layout_map=layouts, optimizer=config, penalty=penalty)
    model.compile(optimizer, "mse")
    return model, executed.largest(executed.watch(lambda: model.train_on_batch(*batch())))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rows_travel_and_no_device_has_the_table(mesh: str, optimizer: str) -> None:
    model, step = first_step(mesh, optimizer)
    host = attached(model).topology.host
    assert host not in attached(model).topology.devices
    sent = [t for t in step.transfers if host in (t.source, t.target) and not t.control]
    tensors = [t for t in sent if t.shape != ()]  # of scalars there is the learning rate
    (planned,) = model.plan().host_tables()
    assert planned.combined == (optimizer == "sgd")
    assert len(tensors) == planned.messages
    assert {t.op for t in tensors if t.source == host} == {"ResourceGather"}
    near = [n for n in step.nodes if n.device != host]
    assert not [n for n in near if n.shape and n.shape[0] == ROWS]
    assert {n.device for n in step.select("ResourceGather")} == {host}
    assert host in step.count(ASSIGNMENTS)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_penalty_reads_and_gives_stays_on_the_host(mesh: str) -> None:
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=2)
    model, step = first_step(mesh, accumulating, penalty="l2")
    assert not [one for one in step.transfers if one.shape and one.shape[0] == ROWS]
    found = {one.device: one for one in memory.measure(attached(model), live(model))}
    host = found.pop(attached(model).topology.host)
    assert host.live is not None and host.live > TABLE
    for one in found.values():
        assert one.live is not None and one.live < TABLE / 10
    assert len(model.plan().host_tables()) == 1


def test_live_tensors_of_devices_are_small() -> None:
    model, _ = first_step("data2", "adam")
    found = {one.device: one for one in memory.measure(attached(model), live(model))}
    host = attached(model).topology.host
    assert found[host].parameters == TABLE
    assert found[host].slots > 2 * TABLE
    for device in attached(model).topology.devices:
        one = found[device]
        assert one.parameters + one.slots < TABLE / 10
        assert one.live is not None and one.live < TABLE / 10


def live(model: keras.Model) -> memory.LiveTensors:
    found = memory.analyse(attached(model), BATCH)
    assert isinstance(found, memory.LiveTensors)
    return found


def test_a_host_that_is_a_device_of_the_mesh_is_said() -> None:
    assert any("which is not in the mesh" in n for n in build(mesh=kdist.mesh(data=2)).plan().notes)
    notes = build(mesh=kdist.mesh(data=8)).plan().notes
    assert any(
        "the host is /device:CPU:0, which is a device of the mesh too" in note for note in notes
    )


def test_plan_and_inspect_show_rows() -> None:
    model, _ = first_step("data2", "adam")
    assert "rows of tables on the host" in str(model.plan())
    assert "rows of table/embeddings on the host: 8 messages" in str(kdist.inspect(model, BATCH))
    (table,) = model.plan().host_tables()
    # Down 9 rows of 64 bytes; up 9 numbers, and 24 rows with theirs: Adam squares them one by one.
    assert table.sent(rows=9, look_ups=24) == (2 * 9 * 64, 2 * (9 * 4 + 24 * (64 + 4)))


def test_saved_and_loaded(tmp_path: Path) -> None:
    x, y = batch()
    model, _ = first_step("data2", "adam")
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "served", verbose=False)
    again = keras.saving.load_model(tmp_path / "model.keras")
    kdist.parallelize(again, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    assert again.plan().weights[0].on_host
    for one in (model, again):
        one.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    served = keras.layers.TFSMLayer(tmp_path / "served", call_endpoint="serve")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(served(x), loaded.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("penalty", [None, "l2"])
def test_own_loop(penalty: str | None) -> None:
    x, y = batch()
    fitted, _ = first_step("data2", "adam", penalty)
    looped = build(mesh=kdist.mesh(data=2), penalty=penalty)
    looped.compile("adam", "mse")
    _, gradients = kdist.gradients(looped, x, y)
    kdist.apply_gradients(looped, gradients)
    for a, b in zip(fitted.get_weights(), looped.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_two_gigabytes_train_beside_small_devices() -> None:
    rows, width = 8_000_000, 64
    tokens = keras.Input((6,), dtype="int32")
    x = kdist.layers.HostEmbedding(rows, width, name="table")(tokens)
    model = keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    looked_up = rng.integers(0, rows, (BATCH, 6)).astype("int32")
    labels = rng.normal(size=(BATCH, 1)).astype("float32")
    losses = [model.train_on_batch(looked_up, labels) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    found = {one.device: one for one in memory.measure(attached(model), live(model))}
    topology = attached(model).topology
    assert found[topology.host].parameters == 4 * rows * width > 2e9
    for device in topology.devices:
        one = found[device]
        assert one.live is not None and one.live + one.parameters + one.slots < 64 * 2**20
