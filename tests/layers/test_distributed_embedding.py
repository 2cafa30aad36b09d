"""Several tables and features in one layer give what NumPy computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import kdist
from kdist.layers import DistributedEmbedding, FeatureConfig, TableConfig

import keras
import numpy as np
import pytest
import tensorflow as tf

IDS = np.array([[3, 1, 1], [2, -1, -1], [-1, -1, -1], [0, 4, -1]], np.int32)
WEIGHTS = np.array([[0.5, 2.0, -1.0], [3.0, 9.0, 9.0], [1.0, 1.0, 1.0], [0.25, 4.0, 7.0]])


def _feature(**table: Any) -> FeatureConfig:
    return FeatureConfig("words", TableConfig("table", 5, 2, **table), (None, 3), (None, 2))


def _numpy(values: np.ndarray, combiner: str, weights: np.ndarray) -> np.ndarray:
    rows = []
    for ids, factors in zip(IDS, weights, strict=True):
        real = ids >= 0
        total = factors[real] @ values[ids[real]]
        by = {
            "sum": 1.0,
            "mean": factors[real].sum(),
            "sqrtn": np.sqrt(np.square(factors[real]).sum()),
        }[combiner]
        rows.append(total / by if real.any() else np.zeros(values.shape[1]))
    return np.array(rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combines_as_numpy_does(combiner: Any, weighted: bool, float64: None) -> None:
    layer = DistributedEmbedding(_feature(combiner=combiner))
    weights = WEIGHTS if weighted else None
    found = layer(IDS, weights)
    (values,) = layer.get_weights()
    expected = _numpy(values, combiner, WEIGHTS if weighted else np.ones_like(WEIGHTS))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_gradients_are_finite_and_padding_has_none(combiner: Any) -> None:
    layer = DistributedEmbedding(_feature(combiner=combiner))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(IDS) ** 2)
    table = layer.tables["table"].embeddings
    gradient = tf.convert_to_tensor(tape.gradient(loss, table.value))
    assert np.isfinite(gradient).all()
    padded = IDS.copy()
    padded[1, 1:] = -7  # any number below 0 is padding
    np.testing.assert_array_equal(layer(padded), layer(IDS))


def test_features_share_tables_and_keep_their_structure() -> None:
    words, users = TableConfig("words", 9, 4), TableConfig("users", 7, 2)
    layer = DistributedEmbedding(
        {
            "texts": [
                FeatureConfig("title", words, (None, 3), (None, 4)),
                FeatureConfig("body", words, (None, 6), (None, 6, 4)),
            ],
            "user": FeatureConfig("user", users, (None,), (None, 2)),
        }
    )
    ids = {
        "texts": [keras.Input((3,), dtype="int32"), keras.Input((6,), dtype="int32")],
        "user": keras.Input((), dtype="int32"),
    }
    rows = layer(ids)
    assert [one.shape for one in keras.tree.flatten(rows)] == [(None, 4), (None, 6, 4), (None, 2)]
    assert [v.path.split("/")[-2:] for v in layer.weights] == [
        ["words", "embeddings"],
        ["users", "embeddings"],
    ]
    model = keras.Model(ids, rows)
    again = keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    given = {
        "texts": [np.arange(6).reshape(2, 3) % 9, np.arange(12).reshape(2, 6) % 9],
        "user": np.array([6, 0]),
    }
    for one, other in zip(*(keras.tree.flatten(m(given)) for m in (model, again)), strict=True):
        np.testing.assert_array_equal(one, other)
    body = model(given)["texts"][1]
    np.testing.assert_array_equal(body, layer.weights[0].numpy()[given["texts"][1]])


@pytest.mark.parametrize("compiled", [False, True])
def test_an_id_outside_its_table_is_named(compiled: bool) -> None:
    layer = DistributedEmbedding(_feature())
    layer.build(None)
    call = tf.function(layer.call) if compiled else layer
    wrong = np.array([[0, 5, -1]], np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="words.*table") as error:
        call(wrong)
    assert "5" in str(error.value)


def test_an_id_outside_its_table_is_dropped_or_hashed() -> None:
    ids = np.array([[0, 5, -1], [12, 12, 12]], np.int32)
    dropping = DistributedEmbedding(_feature(oov="drop", combiner="sum"))
    rows = dropping(ids)
    (values,) = dropping.get_weights()
    np.testing.assert_allclose(rows, [values[0], np.zeros(2)])
    hashing = DistributedEmbedding(_feature(oov="hash", combiner="sum"))
    rows = hashing(ids)
    (values,) = hashing.get_weights()
    np.testing.assert_allclose(rows, [values[0] + values[0], 3 * values[2]], rtol=1e-6)


KINDS = {
    "ragged": tf.ragged.constant([[5], [], [1, 2, 3]], dtype=tf.int32),
    "sparse": tf.SparseTensor([[0, 0], [2, 0], [2, 1], [2, 2]], [5, 1, 2, 3], (3, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_layer_pads_ids_itself(kind: str, weighted: bool) -> None:
    layer = DistributedEmbedding(_feature(combiner="mean", oov="hash"))
    given = KINDS[kind]
    weights = tf.cast(given, tf.float32) + 1.0 if kind == "ragged" else tf.cast(given, tf.float32)
    dense = weights.to_tensor(0.0) if kind == "ragged" else tf.sparse.to_dense(weights)
    expected = layer(layer.preprocess(given), dense if weighted else None)
    found = tf.function(layer.call)(given, weights if weighted else None)
    np.testing.assert_array_equal(found, expected)
    if not weighted:
        np.testing.assert_array_equal(layer(given), expected)


@pytest.mark.parametrize(
    "given",
    [
        [[5], [], [1, 2, 3]],
        tf.ragged.constant([[5], [], [1, 2, 3]], dtype=tf.int32),
        tf.SparseTensor([[0, 0], [2, 0], [2, 1], [2, 2]], [5, 1, 2, 3], (3, 3)),
        np.array([[5, -1, -1], [-1, -1, -1], [1, 2, 3]]),
    ],
    ids=["lists", "ragged", "sparse", "dense"],
)
def test_ids_of_every_kind_are_padded(given: Any) -> None:
    layer = DistributedEmbedding(_feature())
    dense = layer.preprocess(given)
    assert dense.numpy().tolist() == [[5, -1, -1], [-1, -1, -1], [1, 2, 3]]


def test_ids_are_padded_in_a_pipeline() -> None:
    layer = DistributedEmbedding({"a": _feature()})
    ragged = tf.ragged.constant([[0], [], [1, 2, 3], [4, 0]], dtype=tf.int32)
    data = tf.data.Dataset.from_tensor_slices({"a": ragged}).batch(2).map(layer.preprocess)
    found = np.concatenate([one["a"] for one in data])
    assert found.tolist() == [[0, -1, -1], [-1, -1, -1], [1, 2, 3], [4, 0, -1]]


def test_more_ids_than_there_is_room_for() -> None:
    with pytest.raises(ValueError, match="'words' has room for .3,."):
        DistributedEmbedding(_feature()).preprocess([[1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: TableConfig("a/b", 5, 2), "a/b"),
        (lambda: TableConfig("t", 0, 2), "vocabulary_size=0"),
        (lambda: TableConfig("t", 5, 0), "embedding_dim=0"),
        (lambda: TableConfig("t", 5, 2, combiner="max"), "combiner='max'"),
        (lambda: TableConfig("t", 5, 2, placement="tpu"), "placement='tpu'"),
        (lambda: TableConfig("t", 5, 2, oov="ignore"), "oov='ignore'"),
        (lambda: TableConfig("t", 5, 2, optimizer="nadam"), "Nadam"),
        (lambda: TableConfig("t", 5, 2, placement="split"), "rows and columns go together"),
        (lambda: TableConfig("t", 5, 2, rows=(2, 3)), "rows and columns go together"),
        (lambda: TableConfig("t", 5, 2, placement="split", rows=(2, 2)), "whole table: 5"),
        (lambda: kdist.deal_tables([TableConfig("t", 5, 2)], 2, lookups={}), "none for .'t'"),
        (lambda: TableConfig("t", 5, 2, placement="split", columns=(2, 1)), "whole table: 2"),
        (lambda: FeatureConfig("f", TableConfig("t", 5, 2), (None, 3), (None, 4)), "None, 4"),
        (lambda: FeatureConfig("f", TableConfig("t", 5, 2), (None,), (2,)), "output_shape"),
        (lambda: FeatureConfig("f", TableConfig("t", 5, 2), (), (2,)), "output_shape"),
        (lambda: DistributedEmbedding([]), "names"),
        (lambda: DistributedEmbedding([_feature(), _feature()]), "words"),
        (
            lambda: DistributedEmbedding(
                [
                    _feature(),
                    FeatureConfig("other", TableConfig("table", 6, 2), (None,), (None, 2)),
                ]
            ),
            "of one name must be the same",
        ),
        (lambda: DistributedEmbedding({"a": _feature()})([IDS]), "structure of the features"),
        (lambda: DistributedEmbedding(_feature())(keras.Input((4,), dtype="int32")), "None, 4"),
    ],
)
def test_what_is_refused(make: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        make()


def _model(placement: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    words = TableConfig("words", 40, 8, combiner="mean")
    users = TableConfig("users", 30, 8, placement="device")
    if placement != "dealt":
        words = dataclasses.replace(words, placement=placement)
    else:
        users = dataclasses.replace(users, placement="split", rows=(0, 0, 30, 0))
        (words, users), _ = kdist.deal_tables([words, users], 4, lookups={"words": 72})
    layer = DistributedEmbedding(
        {
            "title": FeatureConfig("title", words, (None, 3), (None, 8)),
            "body": FeatureConfig("body", words, (None, 6), (None, 8)),
            "user": FeatureConfig("user", users, (None,), (None, 8)),
        },
        name="tables",
    )
    ids = {
        "title": keras.Input((3,), dtype="int32", name="title"),
        "body": keras.Input((6,), dtype="int32", name="body"),
        "user": keras.Input((), dtype="int32", name="user"),
    }
    rows = layer(ids)
    x = keras.layers.Concatenate()([rows[name] for name in ids])
    x = keras.layers.Dense(16, activation="relu", name="up")(x)
    return keras.Model(ids, keras.layers.Dense(3, name="head")(x))


def _trained(model: keras.Model, data: Any) -> list[np.ndarray]:
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [
        np.array(history.history["loss"]),
        model.predict(data[0], verbose=0),
        *model.get_weights(),
    ]


@pytest.mark.parametrize(
    ("mesh", "level", "placement"),
    [
        ({"data": 4}, 3, "host"),
        ({"data": 4}, 1, "dealt"),
        ({"pipe": 2, "data": 2}, 0, "host"),
        ({"data": 2, "model": 2}, 0, "host"),
        ({"data": 2, "model": 2}, 1, "auto"),
    ],
)
def test_training_equals_one_device(
    mesh: dict[str, int], level: int, placement: str, float64: None
) -> None:
    rng = np.random.default_rng(0)
    ids = {
        "title": rng.integers(-1, 40, (20, 3)).astype("int32"),
        "body": rng.integers(-1, 40, (20, 6)).astype("int32"),
        "user": rng.integers(0, 30, 20).astype("int32"),
    }
    data = ids, rng.integers(0, 3, 20)
    expected = _trained(_model("device"), data)
    options: dict[str, Any] = {}
    if level:
        options["optimizer"] = kdist.OptimizerConfig(level=level, threshold_kb=0)
    if "pipe" in mesh:
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    if "model" in mesh:
        options["layout_map"] = {
            "up/kernel": (None, "model"),
            "tables/users/embeddings": ("model", None),
        }
    config = kdist.ParallelConfig(mesh=kdist.mesh(**mesh), **options)
    model = kdist.parallelize(_model(placement), config)
    found = _trained(model, data)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    hosted = [table.path for table in model.plan().host_tables()]
    assert [path.endswith("words/embeddings") for path in hosted] == [True] * (placement == "host")
    if placement == "dealt":
        sizes = {one.path.split("/")[-2]: one.sizes for one in model.plan().split_tables()}
        assert sizes == {"words": (10, 10, 10, 10), "users": (0, 0, 30, 0)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="user"):
        model.predict({**ids, "user": np.full(20, 30, "int32")}, verbose=0)


def test_tables_are_dealt_by_columns() -> None:
    """Three long rows over two devices: neither a device nor cuts by rows are as even."""
    (table,), found = kdist.deal_tables([TableConfig("t", 3, 64)], 2, lookups={"t": 100})
    assert (table.columns, table.rows) == ((32, 32), None)
    assert found.choices[0].kind == "columns"
    layer = DistributedEmbedding(FeatureConfig("f", table, (None,), (None, 64)))
    (split,) = layer.tables.values()
    assert (split.split_columns, split.input_dim, split.output_dim) == ((32, 32), 3, 64)
    again = DistributedEmbedding.from_config(layer.get_config())
    assert again.tables["t"].split_columns == (32, 32)


def test_the_plan_says_where_tables_went() -> None:
    """What was dealt, with the bytes of each device, and what nothing was decided of."""
    auto = [TableConfig(name, 30, 4) for name in ("first", "second")]
    dealt, _ = kdist.deal_tables(auto, 2, lookups={"first": 9, "second": 9})
    tables = [*dealt, TableConfig("left", 6, 4), TableConfig("far", 6, 4, placement="host")]
    features = [FeatureConfig(f"of_{t.name}", t, (None,), (None, 4)) for t in tables]
    inputs = [keras.Input((), dtype="int32", name=one.name) for one in features]
    layer = DistributedEmbedding(features, name="tables")
    rows = keras.layers.Concatenate()(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(rows))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    (note,) = [one for one in model.plan().notes if one.startswith("tables of 'tables'")]
    for part in (
        f"'first' by rows {dealt[0].rows} over 'data'",
        "'left' whole on every device, 'far'",
        "'far' on the host",
        "parts per device of 'data': 480 B, 480 B",
    ):
        assert part in note


@pytest.mark.parametrize("compiled", [False, True])
def test_errors_name_feature_table_and_value(compiled: bool) -> None:
    table = TableConfig("vocabulary", 500, 2)
    layer = DistributedEmbedding(FeatureConfig("query", table, (None, 3), (None, 2)))
    layer.build(None)
    call = tf.function(layer.call) if compiled else layer
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        call(np.array([[0, 7123, -1]], np.int32))
    text = str(error.value)
    assert "Feature query has an id that table vocabulary does not have" in text
    assert "7123" in text
