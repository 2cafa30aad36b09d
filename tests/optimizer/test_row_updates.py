"""Which updates change rows of a table alone; that then these rows are sent, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist import FusionConfig, OptimizerConfig, StateFormatConfig
from kdist._compat import keras_trainer
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.optimizer import wrappers
from kdist.optimizer.local import ROW_WISE, changes_rows_only, needs_whole

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_same_weights, in_float64
from ..runtime.step_parts import first_step

TABLE, COLUMNS, LOOK_UPS, BATCH = 96, 8, 2, 8

OPTIMIZERS = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
    *("ScheduleFreeAdamW", "Lamb", "Adafactor"),
)
"""All that Keras ships, but for Muon, which takes no rows."""
OPTIONS: Mapping[str, dict[str, Any]] = {
    "": {},
    "decay": {"weight_decay": 0.1},
    "clipvalue": {"clipvalue": 0.1},
    "clipnorm": {"clipnorm": 0.1},
    "global clipnorm": {"global_clipnorm": 0.1},
    "averages": {"use_ema": True},
    "averages written": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
}


def settings() -> list[Any]:
    found = []
    for name in OPTIMIZERS:
        for option, arguments in OPTIONS.items():
            takes = {"momentum": ("SGD", "RMSprop"), "centered": ("RMSprop",)}.get(option)
            if takes is None or name in takes:
                marks = () if name in ROW_WISE or not option else (pytest.mark.long,)
                case = f"{name} {option}".strip()
                found.append(pytest.param(name, arguments, id=case, marks=marks))
    for option in ("", "averages", "averages written"):
        case = f"lazy SGD {option}".strip()
        found.append(pytest.param("lazy SGD", OPTIONS[option], id=case))
    return found


@pytest.mark.parametrize(("name", "arguments"), settings())
def test_the_rule_is_what_keras_does(name: str, arguments: Mapping[str, Any]) -> None:
    """Against the operations that write the table, and the bits of rows that nobody looked up."""
    table = keras.Variable(np.random.default_rng(0).normal(size=(6, 2)), dtype="float32")
    optimizer = getattr(keras.optimizers, name.removeprefix("lazy "))(**arguments)
    optimizer = kdist.lazy(optimizer) if name.startswith("lazy") else optimizer
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(rows: Any) -> None:
        values = tf.fill([tf.size(rows), 2], 0.5)
        optimizer.apply([tf.IndexedSlices(values, rows, tf.constant([6, 2]))], [table])

    step(tf.constant([0, 1, 1]))
    before = table.numpy()
    for _ in range(3):
        step(tf.constant([2, 3, 3]))
    same = np.array_equal(before[[0, 1, 4, 5]], table.numpy()[[0, 1, 4, 5]])
    assert not np.array_equal(before[2], table.numpy()[2])
    graph = step.get_concrete_function(tf.constant([0, 0, 0])).graph
    (handle,) = [inside for outside, inside in graph.captures if outside is table.value.handle]
    writes = {one.type for one in handle.consumers()} - {"ReadVariableOp", "ResourceGather"}
    of_rows = all(one.startswith("ResourceScatter") for one in writes)
    if changes_rows_only(optimizer, table):
        assert same and of_rows
    else:
        assert not (same and of_rows) or needs_whole(optimizer, table)


def test_constraints_and_own_classes_see_all_rows() -> None:
    class Own(keras.optimizers.SGD):
        pass

    table = keras.Variable(np.ones((6, 2)))
    assert changes_rows_only(keras.optimizers.SGD(), table)
    assert not changes_rows_only(Own(), table)
    table.constraint = keras.constraints.NonNeg()
    assert not changes_rows_only(keras.optimizers.SGD(), table)


def test_a_table_may_be_left_out_of_decay() -> None:
    table = keras.Variable(np.ones((6, 2)), name="table")
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[table])
    assert changes_rows_only(optimizer, table)


# -- what the executed step sends ----------------------------------------------------------------

MESHES: Mapping[str, tuple[dict[str, int], Any]] = {
    "data4": ({"data": 4}, None),
    "rows": ({"data": 2, "model": 2}, {".*embeddings": ("model", None)}),
    "columns": ({"data": 2, "model": 2}, {".*embeddings": (None, "model")}),
    "whole": ({"data": 2, "model": 2}, {".*up/kernel": (None, "model")}),
    "pipe": ({"pipe": 2, "data": 2}, None),
    "pipe columns": ({"pipe": 2, "data": 2, "model": 2}, {".*embeddings": (None, "model")}),
}
ROW, HALF = COLUMNS * 8 + 4, COLUMNS * 4 + 4
"""Bytes of a row of the table, or of half of its columns, and of its number."""
SENT = {
    # messages, bytes per row that changes, writes of each row
    ("data4", 0): (3, 3 * ROW, 3),
    ("data4", 1): (6, 4 * ROW, 4),
    ("data4", 2): (6, 4 * ROW, 4),
    ("data4", 3): (0, 0, 0),
    ("rows", 0): (2, ROW, 1),
    ("rows", 2): (4, 2 * ROW, 2),
    ("columns", 0): (2, 2 * HALF, 2),
    ("columns", 1): (4, 4 * HALF, 4),
    ("whole", 0): (3, 3 * ROW, 3),
    ("whole", 3): (2, ROW, 1),
    ("pipe", 0): (1, ROW, 1),
    ("pipe", 2): (2, 2 * ROW, 2),
    ("pipe columns", 0): (2, 2 * HALF, 2),
}
DEFAULT = {("data4", 0), ("rows", 0), ("columns", 1), ("pipe", 2)}


def network(table: int = TABLE) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LOOK_UPS,), dtype="int32")
    x = keras.layers.Embedding(table, COLUMNS, name="table")(inputs)
    x = keras.layers.Dense(8, "tanh", name="up")(keras.layers.Flatten(name="flat")(x))
    return keras.Model(inputs, keras.layers.Dense(4, name="down")(x))


def parallel(
    mesh: str, level: int, optimizer: Any, table: int = TABLE, **options: Any
) -> keras.Model:
    axes, cuts = MESHES[mesh]
    stages = kdist.PipelineConfig(micro_batches=2, stages={"table|flat|up": 0, "down": 1})
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts,
        optimizer=OptimizerConfig(level=level, threshold_kb=0, **options),
        pipeline=stages if "pipe" in axes else None,
    )
    model = kdist.parallelize(network(table), config)
    model.compile(optimizer, "mse")
    return model


def batches(steps: int, duplicates: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    found = []
    for n in range(steps):
        size = BATCH * LOOK_UPS
        x = 5 * random.integers(0, 19, size) if duplicates else n * size + random.permutation(size)
        y = random.normal(size=(BATCH, 4))
        found.append((x.reshape(BATCH, LOOK_UPS).astype("int32") % TABLE, y))
    return found


def train(model: keras.Model, data: Any) -> None:
    for x, y in data:
        model.train_on_batch(x, y)


def assert_copies_agree(model: keras.Model) -> None:
    for entry in attached(model).entries.values():
        for at, local in entry.locals.items():
            expected = entry.variable.numpy()[entry.placement.shard_at(at).index]
            np.testing.assert_array_equal(local.numpy(), expected, err_msg=entry.placement.path)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> tf.Variable:
    """Counts the rows that arrive, while steps run."""
    count, write = tf.Variable(0, dtype=tf.int64), keras_trainer.write_rows

    def counted(variable: Any, rows: Any, values: Any) -> Any:
        arrived = tf.size(rows, tf.int64)
        with tf.device("CPU:0"):
            count.assign_add(arrived)
        return write(variable, rows, values)

    monkeypatch.setattr(keras_trainer, "write_rows", counted)
    return count


def rows(keys: Any, default: Any) -> list[Any]:
    marks = lambda key: () if key in default else (pytest.mark.long,)  # noqa: E731
    return [pytest.param(*key, marks=marks(key), id=" ".join(map(str, key))) for key in keys]


@pytest.mark.parametrize(("mesh", "level"), rows(SENT, DEFAULT))
def test_rows_that_change_are_sent(mesh: str, level: int, written: tf.Variable) -> None:
    with in_float64():
        ((x, y),) = batches(1, duplicates=False)
        model = parallel(mesh, level, keras.optimizers.SGD(0.1))
        before = model.plan()
        parts, functions = first_step(model, x, y)
    (table,), (messages, row_bytes, writes) = model.plan().tables(), SENT[mesh, level]
    assert model.plan() == before
    assert (table.changed_messages, table.changed_bytes) == (messages, row_bytes)
    looked_up = x.size // MESHES[mesh][0]["data"]
    assert table.changed(looked_up) == x.size
    assert written.numpy() == writes * x.size
    assert table.nbytes(looked_up) == table.row_bytes * looked_up + row_bytes * x.size
    step = executed.largest([f for f in functions if len(f.select(executed.ASSIGNMENTS)) > 3])
    sent = [t for t in step.transfers if parts.explain(t) == "changed rows"]
    assert len([t for t in sent if t.dtype == "float64"]) == messages
    assert len([t for t in sent if t.dtype == "int32"]) == messages
    widths = {parts._shape(parts.inlined(t))[1] for t in sent if t.dtype == "float64"}
    assert widths <= {COLUMNS // 2 if "columns" in mesh else COLUMNS}
    if level < 3:
        across = [
            t for t in step.transfers if slice_of(model, t.source) != slice_of(model, t.target)
        ]
        shapes = [parts._shape(parts.inlined(t)) for t in across]
        largest = TABLE * COLUMNS // 4
        assert all(s.num_elements() < largest for s in shapes if s.is_fully_defined())


@pytest.mark.parametrize("level", [1, 2])
def test_columns_of_rows_that_change_meet_and_are_sent(level: int, written: tf.Variable) -> None:
    """Replicas share columns of a table whose rows they do not divide."""
    with in_float64():
        ((x, y),) = batches(1, duplicates=False)
        model = parallel("data4", level, keras.optimizers.SGD(0.1), table=TABLE + 1)
        parts, functions = first_step(model, x, y)
    (table,) = model.plan().tables()
    # A quarter of the columns from three owners to the fourth, and the row from there to three.
    assert (table.changed_messages, table.changed_bytes) == (6, 3 * ROW + 3 * COLUMNS * 8 // 4)
    assert written.numpy() == 4 * x.size
    step = executed.largest([f for f in functions if len(f.select(executed.ASSIGNMENTS)) > 3])
    sent = [t for t in step.transfers if parts.explain(t) == "changed rows"]
    widths = [parts._shape(parts.inlined(t))[1] for t in sent if t.dtype == "float64"]
    assert sorted(widths) == [COLUMNS // 4] * 3 + [COLUMNS] * 3
    assert sum(t.dtype == "int32" for t in sent) == 3
    assert_copies_agree(model)


def test_a_row_is_sent_once(written: tf.Variable) -> None:
    ((x, y),) = batches(1)
    model = parallel("data4", 0, keras.optimizers.SGD(0.1))
    model.train_on_batch(x, y)
    assert written.numpy() == 3 * len(np.unique(x)) < 3 * x.size
    (table,) = model.plan().tables()
    assert table.changed(x.size // 4) == x.size  # at most


def slice_of(model: keras.Model, device: str) -> int:
    slices = attached(model).topology.slices
    return next(n for n, one in enumerate(slices) if device in one.devices)


def test_a_large_table() -> None:
    """100,000 x 16 in float32, 128 look-ups on 4 replicas: 19.2 MB a step, sent whole."""
    inputs = keras.Input((1,), dtype="int32")
    x = keras.layers.Embedding(100_000, 16, name="table")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    sent = {}
    for name in ("Adam", "Adagrad"):
        model.compile(name, "mse")
        plan = model.plan()
        rows = sum(table.nbytes(32) for table in plan.tables())
        sent[name] = rows + sum(t.nbytes for t in plan.traffic())
    dense = sum(t.nbytes for t in plan.traffic())
    assert sent["Adam"] == 3 * 32 * 68 + 3 * 100_000 * 64 + dense  # 19.2 MB
    assert sent["Adagrad"] == 3 * 32 * 68 + 3 * 128 * 68 + dense < 34_000
    # Never more than the table.
    (table,) = plan.tables()
    assert table.nbytes(10**6) - table.row_bytes * 10**6 == 3 * 100_000 * 68


# -- training equals one device ------------------------------------------------------------------

SGD: Callable[..., Any] = keras.optimizers.SGD
TRAINED: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.1, clipvalue=0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0, use_ema=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adagrad(0.1), initial_scale=2.0**10, dynamic_growth_steps=2
    ),
    "averages written": lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: SGD(0.1, gradient_accumulation_steps=2),
}
EQUAL = [(name, mesh, level) for name in TRAINED for mesh in MESHES for level in range(4)]
FEW = {("sgd", "data4", 1), ("scaled", "rows", 0)}


@pytest.mark.parametrize(("name", "mesh", "level"), rows(EQUAL, FEW))
def test_equals_one_device(name: str, mesh: str, level: int) -> None:
    data = batches(5)
    with in_float64():
        plain, model = network(), parallel(mesh, level, TRAINED[name]())
        plain.compile(TRAINED[name](), "mse")
        for one in (plain, model):
            train(one, data[:3])
            if name == "scaled":
                x, y = data[3]
                train(one, [(x, np.full_like(y, np.inf))])  # skipped
            train(one, data[3:])
        assert_copies_agree(model)
        assert_same_weights(plain, model)


def test_of_rows_their_values_are_asked_whether_they_are_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, is_finite = [], tf.math.is_finite

    def noted(x: Any, *args: Any) -> Any:
        asked.append(tuple(x.shape))
        return is_finite(x, *args)

    monkeypatch.setattr(tf.math, "is_finite", noted)
    train(parallel("data4", 0, TRAINED["scaled"]()), batches(1))
    assert (None, COLUMNS) not in asked and (BATCH * LOOK_UPS, COLUMNS) in asked


@pytest.mark.parametrize(
    "mesh", ["data4", *(pytest.param(m, marks=pytest.mark.long) for m in ("columns", "pipe"))]
)
def test_own_loops_send_rows(mesh: str, written: tf.Variable) -> None:
    data = batches(3)
    with in_float64():
        plain, model = network(), parallel(mesh, 1, SGD(0.1))
        plain.compile(SGD(0.1), "mse")
        train(plain, data)
        for x, y in data:
            kdist.apply_gradients(model, kdist.gradients(model, x, y)[1])
        assert written.numpy() > 0
        assert_copies_agree(model)
        assert_same_weights(plain, model)


@pytest.mark.long
@pytest.mark.parametrize("level", [0, 1])
def test_formats_of_moments_change_no_bit(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is that of a table which is sent whole."""
    formats = StateFormatConfig(second="bf16", rounding="stochastic")
    found = []
    for rule in (changes_rows_only, lambda *_: False):
        monkeypatch.setattr(wrappers, "changes_rows_only", rule)
        model = parallel("data4", level, keras.optimizers.Adagrad(0.1), state_format=formats)
        train(model, batches(3))
        assert bool(model.plan().tables()[0].changed_bytes) == (rule is changes_rows_only)
        assert_copies_agree(model)
        found.append([v.numpy() for v in (*model.weights, *model.optimizer.variables)])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


def test_callback_counts_rows() -> None:
    logs: dict[str, Any] = {}
    model = parallel("data4", 0, SGD(0.1))
    callback = kdist.callbacks.CommFusion(tune=False, candidates=(FusionConfig(),))
    callback.set_model(model)
    train(model, batches(1))
    before = [v.numpy() for v in model.weights]
    callback.on_epoch_end(0, logs)
    (table,) = model.plan().tables()
    assert logs["comm_bytes"] == sum(t.nbytes for t in model.plan().traffic())
    assert logs["comm_bytes"] < TABLE * COLUMNS * 4 * 3
    assert logs["comm_row_bytes/table/embeddings"] == table.nbytes(1) == (3 + 4 * 3) * 36
    for a, b in zip(before, model.weights):
        np.testing.assert_array_equal(a, b.numpy())
    assert math.isfinite(logs["comm_seconds"])
