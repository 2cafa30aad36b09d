"""Training by layout maps that are found: its numbers, and what a step sends."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

from .test_layout_map_for import Attention, axes, transformer


def written_as(written: str) -> keras.Model:
    if written == "layers of Keras":
        return transformer()
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 16))
    feed = [keras.layers.Dense(64, "relu", name="up"), keras.layers.Dense(16, name="down")]
    return keras.Model(x, keras.Sequential(feed, name="feed")(Attention(16, 4)(x)))


def trained_alike(written: str, mesh: Any, **options: Any) -> keras.Model:
    """A model over a mesh, by the map that is found, after training; equal to a plain one."""
    rng = np.random.default_rng(0)
    plain, parallel = written_as(written), written_as(written)
    x = rng.integers(0, 64, (8, 8)) if written == "layers of Keras" else rng.normal(size=(8, 8, 16))
    y = rng.normal(size=(8, *plain.output_shape[1:]))
    layouts = kdist.layout_map_for(parallel, mesh)
    kdist.parallelize(parallel, kdist.ParallelConfig(mesh=mesh, layout_map=layouts, **options))
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    for one, other in zip(plain.get_weights(), parallel.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    return parallel


WRITTEN = ["layers of Keras", "layers of one's own"]


@pytest.mark.parametrize("written", WRITTEN)
def test_a_block_sends_one_sum_for_attention_and_one_for_the_rest(
    written: str, float64: None
) -> None:
    parallel = trained_alike(written, axes())
    blocks = 2 if written == "layers of Keras" else 1
    inspection = kdist.inspect(parallel)
    assert inspection.count("all-reduce", phase="forward") == 2 * blocks
    assert inspection.count("all-gather") == 0


FORMS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "level 3": ({"data": 2, "model": 2}, {"optimizer": kdist.OptimizerConfig(level=3)}),
    "stages": (
        {"pipe": 2, "data": 2, "model": 2},
        {
            "pipeline": kdist.PipelineConfig(micro_batches=2),
            "optimizer": kdist.OptimizerConfig(level=1),
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("written", WRITTEN)
def test_with_levels_stages_and_sequences_that_are_cut(
    written: str, form: str, float64: None
) -> None:
    sizes, options = FORMS[form]
    trained_alike(written, kdist.mesh(**sizes), sequence_parallel=True, **options)
