"""What devices hold, and send, of a table that is split by hand."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.graphs.executed import ExecutedFunction
from kdist.report import memory
from kdist.report.look_ups import sent_by_look_ups

import keras
import numpy as np
import pytest
import tensorflow as tf

ROWS, WIDTH, BATCH = (3000, 7000), 8, 8
MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 2},
    "model": {"model": 2},
    "data_of_two": {"data": 2, "model": 2},
    "model_of_two": {"data": 2, "model": 2},
    "data4": {"data": 4},
    "model4": {"model": 4},
}


def build(where: str, rows: tuple[int, ...], **options: Any) -> keras.Model:
    axis, axes = where.rstrip("4").removesuffix("_of_two"), MESHES[where]
    local, columns = options.pop("local_columns", False), options.pop("columns", WIDTH)
    penalty = options.pop("penalty", None)
    tokens = keras.Input((len(rows) if local else 8,), dtype="int32")
    given: Any = rows if columns == WIDTH else sum(rows)
    table = kdist.layers.SplitEmbedding(
        given, columns, axis, local, name="table", embeddings_regularizer=penalty
    )
    x = keras.layers.Dense(8, name="up")(keras.layers.Flatten()(table(tokens)))
    model = keras.Model(tokens, keras.layers.Dense(1, name="head")(x))
    layouts = {"up/kernel": (None, "model")} if "model" in axes else {}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts, **options)
    kdist.parallelize(model, config).compile("adam", "mse")
    return model


def first_step(model: keras.Model, ids: np.ndarray) -> ExecutedFunction:
    targets = np.random.default_rng(0).normal(size=(len(ids), 1))
    return executed.largest(executed.watch(lambda: model.train_on_batch(ids, targets)))


@pytest.mark.parametrize("penalty", [None, "l2"])
@pytest.mark.parametrize("where", ["data", "model_of_two"])
def test_parts_are_as_declared(where: str, penalty: str | None) -> None:
    model = build(where, ROWS, penalty=penalty)
    step = first_step(model, np.zeros((BATCH, 8), "int32"))
    entry = attached(model).entries[id(model.get_layer("table").embeddings)]
    for (s, k), local in entry.locals.items():
        part = s if where == "data" else k
        assert tuple(local.shape) == (ROWS[part], WIDTH)
    assert len(entry.locals) == len(attached(model).topology.devices)
    # Nothing of the size of another part, or of the table, is made anywhere.
    for node in step.nodes:
        if node.shape and node.shape[0] in (*ROWS, sum(ROWS)):
            part = ROWS.index(node.shape[0])
            holders = {entry.device(at) for at in entry.placement.shards[part].holders}
            assert node.device in holders
    assert "split by hand" in str(model.plan())


class Together(keras.regularizers.Regularizer):
    """No sum of what elements give."""

    def __call__(self, x: Any) -> Any:
        return 0.1 * tf.sqrt(tf.reduce_sum(tf.square(x)))


@pytest.mark.parametrize("columns", [WIDTH, (2, 6)])
@pytest.mark.parametrize("penalty", ["l2", Together()])
@pytest.mark.parametrize("where", ["data", "model_of_two"])
def test_gradients_of_penalties(where: str, penalty: Any, columns: Any, float64: None) -> None:
    """Own loops get them whole, and evaluation counts the penalty."""
    found = []
    for wanted in (None, penalty):
        keras.utils.set_random_seed(0)
        model = build(where, (3, 13), columns=columns, penalty=wanted)
        x, y = np.arange(16, dtype="int32").reshape(2, 8), np.ones((2, 1))
        loss, gradients = kdist.gradients(model, x, y)
        found.append((float(loss), gradients[0], model.evaluate(x, y, verbose=0)))
    weights = tf.Variable(model.get_layer("table").embeddings.numpy())
    with tf.GradientTape() as tape:
        expected = keras.regularizers.get(penalty)(weights)
    more = tf.convert_to_tensor(found[1][1]) - tf.convert_to_tensor(found[0][1])
    np.testing.assert_allclose(more, tape.gradient(expected, weights), rtol=1e-9, atol=1e-12)
    for number in (0, 2):
        np.testing.assert_allclose(found[1][number] - found[0][number], expected, rtol=1e-9)


def test_live_tensors_of_a_penalty() -> None:
    """A device has its part of the gradient, and no other."""
    model = build("data", ROWS, penalty="l2")
    first_step(model, np.zeros((BATCH, 8), "int32"))
    live = memory.analyse(attached(model), BATCH)
    assert isinstance(live, memory.LiveTensors)
    found = {one.device: one.live for one in memory.measure(attached(model), live)}
    small, large = [found[device] for device in attached(model).topology.devices]
    assert small is not None and large is not None
    assert small < large < 6 * 4 * ROWS[1] * WIDTH


@pytest.mark.parametrize("alltoall", [False, True])
@pytest.mark.parametrize("where", ["data_of_two", "model_of_two", "data4", "model4"])
def test_rows_travel_as_planned(where: str, alltoall: bool) -> None:
    """Every replica looks 64 different rows up, as many in each part."""
    size = 4 if where.endswith("4") else 2
    rows = tuple(1000 + 100 * part for part in range(size))
    model = build(where, rows, enable_alltoall=alltoall)
    replicas = MESHES[where].get("data", 1)
    starts = np.cumsum((0, *rows[:-1]))
    ids = np.stack([start + np.arange(64 // size) for start in starts]).reshape(1, -1)
    ids = np.concatenate([ids + 100 * r for r in range(replicas)]).astype("int32")
    sent = sent_by_look_ups(first_step(model, ids.reshape(-1, 8)))
    (planned,) = model.plan().split_tables()
    assert planned.messages == sent.messages
    each = 64 // size if alltoall else 64
    measured = sent.nbytes(each, WIDTH, 64)
    expected = planned.used.nbytes(64, 64)
    exchanged, masked = "all-gather", "all-reduce"
    if where.startswith("data"):
        exchanged, masked = "all-to-all", "reduce-scatter"
    ways = [planned.used.way, planned.others[0].way]
    assert ways == ([exchanged, masked] if alltoall else [masked, exchanged])
    if alltoall:
        assert planned.used.at_most and measured <= expected
        assert measured < planned.others[0].nbytes(64, 64)
    else:
        assert not planned.used.at_most and measured == expected
    assert all(way in str(model.plan()) for way in ways)


@pytest.mark.parametrize("where", ["model", "data_of_two"])
def test_columns_of_rows_travel_as_planned(where: str) -> None:
    model = build(where, ROWS, columns=(2, 6))
    entry = attached(model).entries[id(model.get_layer("table").embeddings)]
    assert {tuple(v.shape) for v in entry.locals.values()} == {(10_000, 2), (10_000, 6)}
    replicas = MESHES[where].get("data", 1)
    ids = np.arange(64 * replicas, dtype="int32").reshape(-1, 8)
    sent = sent_by_look_ups(first_step(model, ids))
    (planned,) = model.plan().split_tables()
    assert planned.messages == sent.messages
    widths = {entry.device(at): v.shape[1] for at, v in entry.locals.items()}
    measured = sent.nbytes(64, 0, 64)
    measured += sum(4 * 64 * widths[one.source] for one in sent.rows)
    assert measured == planned.used.nbytes(64, 64)
    assert "(2, 6)" in str(model.plan()) and "by columns" in str(model.plan())


@pytest.mark.parametrize("where", ["data", "model4", "model_of_two"])
def test_local_columns_send_rows_alone(where: str) -> None:
    size = 4 if where.endswith("4") else 2
    rows = tuple(1000 + 100 * part for part in range(size))
    model = build(where, rows, local_columns=True)
    starts = np.cumsum((0, *rows[:-1]))
    ids = starts + np.random.default_rng(0).integers(0, 1000, (BATCH, size))
    sent = sent_by_look_ups(first_step(model, ids.astype("int32")))
    assert not sent.numbers and not sent.positions
    (planned,) = model.plan().split_tables()
    assert planned.used.way == "local columns"
    assert planned.messages == len(sent.rows)
    replicas = MESHES[where].get("data", 1)
    sizes = [one.nbytes for one in sent.rows if one.nbytes is not None]
    assert sum(sizes) == planned.used.nbytes(0, BATCH * size // replicas)
    assert len(sizes) == len(sent.rows)


def test_an_id_of_another_part_reaches_the_user_of_fit() -> None:
    model = build("model", (10, 20), local_columns=True)
    right = np.array([[3, 29]] * 4, "int32")
    model.fit(right, np.zeros((4, 1)), verbose=0)
    wrong = right.copy()
    wrong[2] = 3, 4
    message = r"Column 1 of the ids of table table/embeddings.*10 to 29. Received:.*\[4\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)" + message):
        model.fit(wrong, np.zeros((4, 1)), verbose=0)
    assert "local columns" in str(kdist.inspect(model))  # which runs a step on zeros


def test_columns_are_as_many_as_parts() -> None:
    tokens = keras.Input((3,), dtype="int32")
    table = kdist.layers.SplitEmbedding((10, 20), 2, local_columns=True, name="table")
    short = keras.Model(tokens, keras.layers.Flatten()(table(tokens)))
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2))
    kdist.parallelize(short, config).compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"each part of the table: 2. Received: layer 'table'"):
        short.predict(np.zeros((4, 3), "int32"), verbose=0)


def test_gradients_accumulate_where_a_part_has_no_rows() -> None:
    model = build("data", (0, 10))
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2), "mse")
    table = model.get_layer("table").embeddings
    before, seen = table.numpy(), []
    for _ in range(2):
        model.train_on_batch(np.full((4, 8), 7, "int32"), np.ones((4, 1)))
        seen.append(np.flatnonzero((table.numpy() != before).any(1)).tolist())
    assert seen == [[], [7]]


def test_an_id_that_no_part_has() -> None:
    model = build("data", (10, 20))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)0 to 29. Received:.*\[30\]"):
        model.predict(np.full((4, 8), 30, "int32"), verbose=0)


def test_saved_and_loaded(tmp_path: object) -> None:
    layer = kdist.layers.SplitEmbedding(rows=(3, 4), dim=2, axis="data", name="table")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer, keras.layers.Flatten()])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.save(f"{tmp_path}/model.keras")
    again = keras.saving.load_model(f"{tmp_path}/model.keras")
    assert again.get_layer("table").split_rows == (3, 4)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
