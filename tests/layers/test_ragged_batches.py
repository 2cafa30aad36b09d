"""Ragged and sparse batches of many sizes train as on one device."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.layers import DistributedEmbedding, FeatureConfig, TableConfig

import keras
import numpy as np
import pytest
import tensorflow as tf

ROOM = 5
"""Ids of an example, at most."""


def _model(kind: str, placement: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    rows = (10, 20) if placement == "split" else None
    table = TableConfig("words", 30, 4, placement=placement, rows=rows)
    ids = keras.Input((ROOM,), dtype="int32", **{kind: True})
    text = DistributedEmbedding(FeatureConfig("text", table, (None, ROOM), (None, 4)))(ids)
    return keras.Model(ids, keras.layers.Dense(1)(text))


def _batch(kind: str, rng: np.random.Generator, size: int) -> tuple[Any, np.ndarray]:
    # Of both kinds, one example has as many ids as there is room for.
    lengths = [ROOM, *rng.integers(1, ROOM + 1, size - 1)]
    ids = tf.ragged.constant([rng.integers(1, 30, n).tolist() for n in lengths], dtype=tf.int32)
    return ids if kind == "ragged" else ids.to_sparse(), rng.normal(size=(size, 1))


@pytest.mark.filterwarnings("error:.*could not be found out whether rows")
@pytest.mark.parametrize(
    ("kind", "placement", "level", "stages", "eager"),
    [
        ("ragged", "auto", 0, 1, False),
        ("ragged", "host", 3, 1, False),
        ("sparse", "auto", 0, 1, False),
        ("ragged", "split", 0, 1, False),
        ("ragged", "auto", 0, 2, False),
        ("ragged", "host", 0, 2, True),
        ("sparse", "host", 0, 2, False),
    ],
)
def test_train_on_batch_of_many_sizes(
    kind: str, placement: str, level: int, stages: int, eager: bool, float64: None
) -> None:
    rng = np.random.default_rng(0)
    batches = [_batch(kind, rng, size) for size in (8, 6, 7, 1, 8)]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2) if stages == 1 else kdist.mesh(pipe=2, data=2),
        optimizer=kdist.OptimizerConfig(level=level),
        pipeline=None if stages == 1 else kdist.PipelineConfig(micro_batches=2),
    )
    found = []
    for model in (_model(kind, "device"), kdist.parallelize(_model(kind, placement), config)):
        model.compile("adam", "mse", run_eagerly=eager)
        losses = [model.train_on_batch(*batch) for batch in batches]
        losses += [model.test_on_batch(*batch) for batch in batches]
        outputs = [model.predict_on_batch(x) for x, _ in batches]
        found.append([np.array(losses), *outputs, *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def _parallel(model: keras.Model, axes: dict[str, int], level: int = 0) -> keras.Model:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map={".*head/kernel": ("model", None)} if "model" in axes else None,
        optimizer=kdist.OptimizerConfig(level=level),
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
    )
    return kdist.parallelize(model, config)


INNER = {"data": 2, "model": 2}


class Called(keras.Model):
    """Takes ids in a dict, as no graph of layers says."""

    def __init__(self, placement: str, prefetch: bool) -> None:
        super().__init__()
        table = TableConfig("words", 30, 4, "normal", placement=placement, prefetch=prefetch)
        text = FeatureConfig("text", table, (None, ROOM), (None, 4))
        other = FeatureConfig("other", table, (None,), (None, 4))
        self.rows = DistributedEmbedding({"text": text, "other": other})
        self.head = keras.layers.Dense(1, name="head")

    def call(self, x: Any) -> Any:
        found = self.rows(x)
        return self.head(found["text"] * found["other"])


@pytest.mark.filterwarnings("error:.*gathered weights")
@pytest.mark.parametrize(
    ("kind", "placement", "axes", "level", "prefetch"),
    [
        ("ragged", "host", INNER, 3, False),
        ("sparse", "device", {"model": 2}, 0, False),
        ("ragged", "host", {"data": 2}, 0, True),
        pytest.param("sparse", "host", INNER, 3, False, marks=pytest.mark.long),
        pytest.param("ragged", "device", {"model": 2}, 0, False, marks=pytest.mark.long),
        pytest.param("sparse", "host", {"data": 2}, 0, True, marks=pytest.mark.long),
        pytest.param("sparse", "host", INNER, 0, True, marks=pytest.mark.long),
        pytest.param("ragged", "host", {"pipe": 2, **INNER}, 1, False, marks=pytest.mark.long),
        pytest.param("sparse", "host", {"pipe": 2, **INNER}, 1, False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ids_that_a_layer_alone_takes_are_padded_before(
    kind: str, placement: str, axes: dict[str, int], level: int, prefetch: bool, float64: None
) -> None:
    """Over inner axes, and one step ahead, a batch has sizes."""
    rng = np.random.default_rng(0)
    x, y = _batch(kind, rng, 28)
    more = rng.integers(0, 30, 28)
    data = tf.data.Dataset.from_tensor_slices(((x, more), y)).batch(8)
    found = []
    for kdist_trains in (False, True):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        if "pipe" in axes:
            ids = keras.Input((ROOM,), dtype="int32", **{kind: True})
            other = keras.Input((), dtype="int64")
            model = Called(placement, prefetch)
            rows = model.rows({"text": ids, "other": other})
            product = keras.layers.Multiply()([rows["text"], rows["other"]])
            model = keras.Model((ids, other), keras.layers.Dense(1, name="head")(product))
        else:
            model = Called(placement, prefetch)
        names = data.map(lambda x, y: ({"text": x[0], "other": x[1]}, y))
        given = data if "pipe" in axes else names
        model(next(iter(given))[0])
        if kdist_trains:
            _parallel(model, axes, level)
        steps = 2 if prefetch else 1
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=steps)
        losses = model.fit(given, verbose=0).history["loss"]
        found.append([losses, model.evaluate(given, verbose=0), model.predict(given, verbose=0)])
        found[-1] += model.get_weights()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_one_tensor_may_be_several_inputs() -> None:
    """Each with the room of its own feature."""
    inputs, rows = [], []
    for room in (ROOM, ROOM + 2):
        table = TableConfig(f"words_{room}", 30, 4, placement="device", combiner="sum")
        feature = FeatureConfig("text", table, (None, room), (None, 4))
        inputs.append(keras.Input((None,), dtype="int32", ragged=True))
        rows.append(DistributedEmbedding(feature)(inputs[-1]))
    head = keras.layers.Dense(1, name="head")
    model = keras.Model(inputs, head(keras.layers.Concatenate()(rows)))
    x, _ = _batch("ragged", np.random.default_rng(0), 4)
    wanted = model([x, x])
    found = _parallel(model, {"model": 2}).predict_on_batch([x, x])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gathered weights")
def test_ids_that_others_look_at_are_not_padded_before() -> None:
    ids = keras.Input((ROOM,), dtype="int32", ragged=True)
    table = TableConfig("words", 30, 4, placement="device")
    text = DistributedEmbedding(FeatureConfig("text", table, (None, ROOM), (None, 4)))(ids)
    largest = keras.layers.Lambda(lambda t: tf.reduce_max(t, 1, keepdims=True))(ids)
    both = keras.layers.Concatenate()([text, keras.ops.cast(largest, "float32")])
    head = keras.layers.Dense(1, name="head")
    model = _parallel(keras.Model(ids, head(keras.layers.Dense(4)(both))), {"model": 2})
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="only a DistributedEmbedding takes.*Received: a ragged"):
        model.train_on_batch(*_batch("ragged", np.random.default_rng(0), 4))


def test_ids_that_cannot_be_below_0_are_padded_too() -> None:
    table = TableConfig("words", 300, 4, combiner="sum")
    layer = DistributedEmbedding(FeatureConfig("text", table, (None, ROOM), (None, 4)))
    ids = tf.ragged.constant([[1, 2], [255]], dtype=tf.uint8)
    found = layer(ids)
    rows = layer.tables["words"].embeddings.numpy()
    np.testing.assert_allclose(found, [rows[1] + rows[2], rows[255]], rtol=1e-6)


class WithExtra(Called):
    """Takes beside ids what may not be there."""

    def __init__(self) -> None:
        super().__init__("device", prefetch=False)
        self.extra = keras.layers.Dense(4, name="extra")

    def call(self, x: Any) -> Any:
        found = self.rows({name: x[name] for name in ("text", "other")})["text"]
        return self.head(found if x["extra"] is None else found + self.extra(x["extra"]))


def test_beside_an_input_that_is_not_there(float64: None) -> None:
    rng = np.random.default_rng(0)
    ids, y = _batch("ragged", rng, 8)
    batches = [
        {"text": ids, "other": rng.integers(1, 30, 8), "extra": extra}
        for extra in (rng.normal(size=(8, 3)), None)
    ]
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = WithExtra()
        model(batches[0])
        if parallel:
            model = _parallel(model, INNER)
        model.compile("adam", "mse")
        losses = [model.train_on_batch(batches[i], y) for i in (0, 1, 0, 1)]
        found.append([np.array(losses), *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
