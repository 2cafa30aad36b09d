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
