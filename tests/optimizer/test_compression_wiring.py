"""What compression refuses, warns of and shows, on models."""

from __future__ import annotations

from typing import Any

import kdist
from kdist import CompressionConfig, PowerSGD
from kdist.api.attached import attached
from kdist.plan.exchange import check_replicas
from kdist.sharding.layout import WeightLayout
from kdist.sharding.placement import place

import keras
import numpy as np
import pytest

from ..runtime.mesh_parts import topology

X = np.arange(8)[:, None] % 6
Y = np.ones((8, 8), np.float32)


class Table(keras.layers.Layer):
    """Looks rows up, and is no `Embedding`."""

    def build(self, input_shape: Any) -> None:
        self.rows = self.add_weight(shape=(16, 16), name="rows")

    def call(self, x: Any) -> Any:
        return keras.ops.take(self.rows, x[:, 0], axis=0)


def model_of(first: keras.layers.Layer) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((1,), dtype="int32"), first, layers.Flatten(), layers.Dense(8, name="head")]
    )


def parallel(model: keras.Model, compression: Any, **options: Any) -> keras.Model:
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), compression=compression, **options)
    return kdist.parallelize(model, config)


def embedding() -> keras.layers.Layer:
    return keras.layers.Embedding(16, 16, name="table")


def test_config_refuses_other_types() -> None:
    with pytest.raises(ValueError, match="Received: compression='bf16'"):
        kdist.ParallelConfig(mesh=kdist.mesh(data=2), compression="bf16")  # type: ignore[arg-type]
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), compression=CompressionConfig())
    assert "rest: PowerSGD(rank=4)" in str(config)


def test_patterns_are_checked_before_anything_moves() -> None:
    model = model_of(embedding())
    with pytest.raises(ValueError, match=r"most similar.*head/kernel.*Received: .*'tail/kernel'"):
        parallel(model, CompressionConfig(patterns={"tail/kernel": "bf16"}))
    assert "_kdist" not in vars(model)
    parallel(model, CompressionConfig(patterns={".*head/kernel": "bf16"}))


def test_tables_travel_as_rows() -> None:
    with pytest.raises(ValueError, match="tables, whose rows travel as they are"):
        parallel(model_of(embedding()), CompressionConfig(patterns={".*embeddings": "bf16"}))
    model = parallel(model_of(embedding()), CompressionConfig(patterns={".*": "bf16"}))
    assert attached(model).classes().compressors() == ("none", "bf16", "bf16")


def test_rows_that_show_only_in_training() -> None:
    """By default a warning; an error where a pattern asks for nothing else."""
    model = parallel(model_of(Table()), CompressionConfig(middle="none", rest="bf16"))
    model.compile("sgd", "mse")
    assert {v for e in model.plan().exchanges for v in e.members} == {0, 1}
    with pytest.warns(UserWarning, match="rows: the gradient is rows of a table"):
        model.train_on_batch(X, Y)
    assert {v for e in model.plan().exchanges for v in e.members} == {1}
    asked = parallel(model_of(Table()), CompressionConfig(patterns={".*rows": "bf16"}))
    asked.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Use 'none' for it. Received: bf16 for .*rows'"):
        asked.train_on_batch(X, Y)


def test_sums_that_may_overflow() -> None:
    whole = [
        place("w", (8, 8), 4, WeightLayout((None, None)), topology(data=n)) for n in (1024, 1025)
    ]
    check_replicas(whole[:1], ["fp16"])
    check_replicas(whole, ["fp16", "bf16"])
    with pytest.raises(ValueError, match="up to 1024 replicas.*'fp16' for 'w' on 1025"):
        check_replicas(whole[1:], ["fp16"])


def test_the_plan_shows_the_classes(capsys: pytest.CaptureFixture[str]) -> None:
    model = parallel(model_of(embedding()), CompressionConfig(patterns={".*head/kernel": "bf16"}))
    model.plan().summary()
    text = capsys.readouterr().out
    assert "gradients on the wire" in text and "bf16" in text and "share" in text


def test_measuring_communication_changes_nothing() -> None:
    """The figures are those of compressed gradients; errors and factors stay."""
    compression = CompressionConfig(patterns={".*head/kernel": PowerSGD(rank=2)})
    found = []
    for callbacks in ([], [kdist.callbacks.CommFusion()]):
        keras.utils.set_random_seed(0)
        model = parallel(model_of(embedding()), compression)
        model.compile("sgd", "mse")
        logs = model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks).history
        found.append((logs["loss"], [v.numpy() for v in attached(model).update.jobs.kept]))
    assert logs["comm_bytes"][0] == sum(t.nbytes for t in model.plan().traffic())
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1]):
        np.testing.assert_array_equal(a, b)
