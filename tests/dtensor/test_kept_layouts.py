"""Operations whose result DTensor would lay out as it cannot: they run on each device's part."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_same_weights
from .dtensor_parts import cut, inner_mesh, run, whole

CUTS: Any = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def transformer() -> keras.Model:
    """Two blocks; their table is whole, so what it gives is cut by what comes after it."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(16, 8)(tokens)
    for i in range(2):
        h = keras.layers.LayerNormalization(name=f"norm_{i}")(x)
        h = keras.layers.Dense(16, "gelu", name=f"{i}_up")(h)
        x = keras.layers.Dense(8, name=f"{i}_down")(h) + x
    return keras.Model(tokens, keras.layers.Dense(16, name="head")(x))


@pytest.mark.usefixtures("float64")
def test_norms_of_a_stage_are_no_islands() -> None:
    models = [transformer(), transformer()]
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(pipe=2, model=2),
        layout_map=CUTS,
        pipeline=kdist.PipelineConfig(micro_batches=2),
        sequence_parallel=True,
    )
    kdist.parallelize(models[1], config)
    x = np.random.default_rng(0).integers(0, 16, (8, 8))
    losses = []
    for model in models:
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses.append([model.train_on_batch(x, x) for _ in range(2)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    assert_same_weights(*models)
    assert not any("cannot expand" in note for note in models[1].plan().notes)


def test_transpositions_of_what_attention_sums_up_are_no_islands() -> None:
    """As KerasHub's Qwen evaluates along the sequence; DTensor wants their results whole."""
    mesh, _ = inner_mesh(model=2)
    shapes = [(2, 4, 8, 8), (2, 4, 8, 8), (32, 8)]
    values = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes)]

    def heads(scores: Any, value: Any, weight: Any) -> Any:
        summed = tf.matmul(tf.nn.softmax(scores), value)
        rows = tf.reshape(tf.transpose(summed, (0, 2, 1, 3)), (16, 32))
        return tf.reshape(rows @ weight, (2, 8, 8))

    layouts = [(None, None, None, "model"), (None, "model", None, None), ("model", None)]
    given = [cut(v, mesh, *dims) for v, dims in zip(values, layouts, strict=True)]
    made, program = run(mesh, heads, *given)
    assert not program.islands
    np.testing.assert_allclose(whole(made), heads(*map(tf.constant, values)), rtol=1e-9)
