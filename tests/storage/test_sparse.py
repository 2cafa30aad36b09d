"""Embedding gradients stay rows, and equal those of a single device, duplicates included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.storage import sparse

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ..parity import assert_close, assert_same_weights

ROWS, COLUMNS = 8, 4


def rows_of(indices: list[int], seed: int = 0) -> tf.IndexedSlices:
    values = np.random.default_rng(seed).normal(size=(len(indices), COLUMNS))
    shape = tf.constant([ROWS, COLUMNS], tf.int64)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices, tf.int64), shape)


def dense(gradient: tf.IndexedSlices) -> np.ndarray:
    return tf.convert_to_tensor(gradient).numpy()


def test_is_sparse():
    assert sparse.is_sparse(rows_of([1]))
    assert not sparse.is_sparse(tf.ones(3))
    assert not sparse.is_sparse(tf.sparse.from_dense([[1.0]]))


def test_rows_by_batch_are_joined_in_order():
    a, b = rows_of([1, 1, 5]), rows_of([5], seed=1)
    joined = sparse.add([a, b], by_batch=True)
    assert joined.indices.numpy().tolist() == [1, 1, 5, 5]
    np.testing.assert_allclose(dense(joined), dense(a) + dense(b))


def test_rows_that_all_looked_up_are_added_row_by_row():
    a, b = rows_of([0, 1, 2]), rows_of([0, 1, 2], seed=1)
    added = sparse.add([a, b], by_batch=False)
    assert added.indices.numpy().tolist() == [0, 1, 2]
    np.testing.assert_allclose(dense(added), dense(a) + dense(b))


def test_one_replica_is_left_alone():
    a = rows_of([3])
    assert sparse.add([a], by_batch=True) is a


@given(
    indices=st.lists(st.integers(0, ROWS - 1), max_size=12),
    rows=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted),
    columns=st.sampled_from([(0, 4), (0, 2), (2, 4), (1, 2)]),
)
@settings(deadline=None, max_examples=60)
def test_restrict_is_the_part_of_the_dense_gradient(indices, rows, columns):
    gradient = rows_of(indices)
    index = (slice(*rows), slice(*columns))
    part = sparse.restrict(gradient, index, (ROWS, COLUMNS))
    assert part.dense_shape.numpy().tolist() == [rows[1] - rows[0], columns[1] - columns[0]]
    np.testing.assert_allclose(dense(part), dense(gradient)[index])


def test_depends_on_values_and_not_on_shapes():
    found = {}

    @tf.function(autograph=False)
    def traced(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        found["values"] = sparse.depends_on(tf.reshape(x, [-1]) + 1, [x])
        found["shape"] = sparse.depends_on(tf.range(tf.shape(x)[0]), [x])
        found["other"] = sparse.depends_on(other * 2, [x])
        found["itself"] = sparse.depends_on(x, [x])
        return x

    traced(tf.ones((2, 3)), tf.ones(2))
    assert found == {"values": True, "shape": False, "other": False, "itself": True}
    assert sparse.depends_on(tf.ones(1), [])


# -- training ----------------------------------------------------------------------------------

TABLES = {
    "data": ({"data": 4}, None),
    "whole": ({"data": 2, "model": 2}, {".*/down/kernel|down/kernel": (None, "model")}),
    "columns": ({"data": 2, "model": 2}, {"table/embeddings": (None, "model")}),
    "rows": ({"data": 2, "model": 2}, {"table/embeddings": ("model", None)}),
    "rows-over-data": ({"data": 2, "model": 2}, {"table/embeddings": ("data", "model")}),
}


def tokens() -> keras.Model:
    """Looks up tokens of the batch and positions that do not depend on it."""
    keras.utils.set_random_seed(3)

    class Positions(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="positions")
            self.table = keras.layers.Embedding(5, COLUMNS, name="positions_table")

        def build(self, shape: Any) -> None:
            self.table.build(())

        def call(self, inputs: Any) -> Any:
            positions = keras.ops.arange(0, keras.ops.shape(inputs)[1], dtype="int32")
            return inputs + self.table(positions)

    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(ROWS, COLUMNS, name="table")(inputs)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Activation("tanh")(Positions()(x)))
    return keras.Model(inputs, keras.layers.Dense(4, name="down")(x))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.01),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    ],
    ids=["momentum", "adam", "clipnorm", "global-clipnorm"],
)
def test_training_equals_one_device(name, optimizer):
    axes, cuts = TABLES[name]
    plain = tokens()
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts)
    parallel = kdist.parallelize(tokens(), config)
    random = np.random.default_rng(0)
    x = random.integers(0, ROWS, (10, 5))
    x[:, 1] = x[:, 0]  # duplicates within a row, and so within a replica
    y = random.normal(size=(10, 4))
    for model in (plain, parallel):
        model.compile(optimizer(), "mse")
    for _ in range(2):
        assert_close(plain.train_on_batch(x, y), parallel.train_on_batch(x, y))
    assert_same_weights(plain, parallel)


def composite_model(build: Callable) -> keras.Model:
    keras.utils.set_random_seed(3)
    return build()


@pytest.mark.usefixtures("float64")
def test_ragged_look_ups_equal_one_device():
    """Equal numbers of look-ups a replica, of other rows: adding them row by row is wrong."""

    def build() -> keras.Model:
        class Look(keras.layers.Layer):
            def __init__(self) -> None:
                super().__init__(name="look")
                self.table = self.add_weight(shape=(ROWS, COLUMNS), name="table")

            def call(self, inputs: Any) -> Any:
                rows = tf.ragged.map_flat_values(lambda flat: tf.gather(self.table, flat), inputs)
                return tf.reduce_sum(rows, axis=1)

        inputs = keras.Input((None,), dtype="int64", ragged=True)
        return keras.Model(inputs, Look()(inputs))

    plain = composite_model(build)
    mesh = kdist.mesh(data=4)
    parallel = kdist.parallelize(composite_model(build), kdist.ParallelConfig(mesh=mesh))
    x = tf.ragged.constant([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=tf.int64)
    y = np.arange(16.0).reshape(4, 4)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    logs = [m.fit(data, verbose=0, epochs=2).history for m in (plain, parallel)]
    assert_close(*logs)
    assert_same_weights(plain, parallel)


@pytest.mark.parametrize("rows", [4, None])
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (lambda x, n: keras.ops.full((n, 1), 3, dtype="int32"), True),
        (lambda x, n: keras.ops.full((n,), 3, dtype="int32"), True),
        (lambda x, n: keras.ops.zeros_like(x), True),
        (lambda x, n: keras.ops.broadcast_to(keras.ops.arange(5), (n, 5)), True),
        (lambda x, n: keras.ops.reshape(keras.ops.zeros((n, 2), dtype="int32"), (-1,)), True),
        (lambda x, n: x[:, 0], True),
        (lambda x, n: keras.ops.arange(4), False),
        (lambda x, n: keras.ops.arange(tf.shape(x)[1]), False),
        (lambda x, n: keras.ops.zeros((3,), dtype="int32"), False),
        (lambda x, n: keras.ops.arange(5)[None], False),
        (lambda x, n: tf.function(lambda: tf.range(4) * 0)(), False),  # not looked into
    ],
)
def test_constant_ids_for_each_row_come_from_the_batch(ids, expected, rows):
    """They are as many as rows, and alike; positions are not."""

    @tf.function
    def call(x):
        found = tf.reshape(ids(x, keras.ops.shape(x)[0]), [-1])
        assert sparse.depends_on(found, [x]) is expected

    call.get_concrete_function(tf.TensorSpec((rows, 2), tf.int32))


@pytest.mark.parametrize("shape", [(1, 1), (1,)])
def test_what_cannot_be_told_of_one_row_is_said(shape):
    @tf.function
    def call(x):
        with pytest.warns(UserWarning, match="two rows"):
            assert not sparse.depends_on(keras.ops.full(shape, 3, dtype="int32"), [x])

    call.get_concrete_function(tf.TensorSpec((1, 2), tf.int32))


@pytest.mark.parametrize(
    ("mode", "lora", "rows"),
    [
        (None, False, ["embeddings"]),
        (None, True, []),
        ("int8", False, []),
        ("int8", True, ["lora_embeddings_a"]),
        ("int4", False, []),
        ("int4", True, ["lora_embeddings_a"]),
    ],
)
def test_tables_that_are_encoded_or_have_factors(
    mode: str | None, lora: bool, rows: list[str]
) -> None:
    """What is said of gradients before a step is traced is what a tape finds; plans can be made."""
    layer = keras.layers.Embedding(12, 4, name="table")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer, keras.layers.Dense(2)])
    if mode is not None:
        layer.quantize(mode)
    if lora:
        layer.enable_lora(2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(np.arange(6).reshape(2, 3)))
    variables = model.trainable_variables
    gradients = tape.gradient(loss, [v.value for v in variables])
    found = [v.name for v, one in zip(variables, gradients) if isinstance(one, tf.IndexedSlices)]
    assert found == rows
    assert [v.name for v in sparse.gradients_of_rows(model)] == rows
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("adam", "mse")
    model.plan(batch_size=4)
    kdist.inspect(model, 4)
