"""Loops of the user's own inside a `tf.function`, whose batches are of a size not known to it."""

from __future__ import annotations

import warnings
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
import tensorflow as tf

MESHES: dict[str, dict[str, Any]] = {
    "data2_model2": {"mesh": {"data": 2, "model": 2}},
    "level3": {
        "mesh": {"data": 2, "model": 2},
        "optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0),
    },
    "pipe2_data2_model2": {
        "mesh": {"pipe": 2, "data": 2, "model": 2},
        "pipeline": kdist.PipelineConfig(micro_batches=2),
    },
}


def build() -> keras.Model:
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="up")(inputs)
    x = keras.layers.Dense(6, activity_regularizer=keras.regularizers.L2(0.01), name="down")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def pair(kind: str) -> tuple[keras.Model, keras.Model]:
    """The same model plain and parallel."""
    options = dict(MESHES[kind])
    plain = build()
    model = build()
    model.set_weights(plain.get_weights())
    mesh = kdist.mesh(**options.pop("mesh"))
    layouts = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
    config = kdist.ParallelConfig(mesh=mesh, layout_map=layouts, **options)
    kdist.parallelize(model, config)
    for one in (plain, model):
        one.compile(keras.optimizers.Adam(1e-2), "mse")
    return plain, model


@pytest.fixture
def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(19, 6)), rng.normal(size=(19, 3))


@pytest.mark.parametrize("kind", MESHES)
def test_an_epoch_in_a_function_stays_cut_and_equals_fit(
    kind: str, data: tuple[Any, Any], float64: None
) -> None:
    plain, model = pair(kind)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(8)  # 8, 8 and 3 rows

    @tf.function
    def epoch(batches: Any) -> None:
        for x, y in batches:
            _, gradients = kdist.gradients(model, x, y)
            kdist.apply_gradients(model, gradients)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        epoch(batches)
        epoch(batches)
    plain.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9, rtol=0)
    assert attached(model).fallbacks == []


def test_one_batch_on_gathered_weights_leaves_the_next_ones_cut(
    data: tuple[Any, Any], float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdist.runtime.by_shape import ByShape

    _, model = pair("data2_model2")
    x, y = (tf.constant(one[:8]) for one in data)
    monkeypatch.setattr(ByShape, "_lifted", lambda *args: None)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64)])
    def loss(x: Any) -> Any:
        return kdist.gradients(model, x, tf.zeros([tf.shape(x)[0], 3], tf.float64))[0]

    with pytest.warns(UserWarning, match="gathered weights"):
        gathered = loss(x)
    parallel = attached(model)
    assert parallel.fallbacks == []
    assert parallel.step_for(None) is parallel.mesh_step
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cut, _ = kdist.gradients(model, x, tf.zeros_like(y))
    np.testing.assert_allclose(gathered, cut, atol=1e-12)


def test_no_gradient_at_all_is_an_error(data: tuple[Any, Any]) -> None:
    _, model = pair("data2_model2")
    kdist.gradients(model, *(one[:8].astype("float32") for one in data))
    with pytest.raises(ValueError, match="At least one gradient"):
        kdist.apply_gradients(model, [None] * len(model.trainable_variables))
