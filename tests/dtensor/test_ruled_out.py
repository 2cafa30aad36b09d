"""Islands that are there for a setting's sake: they are told with the setting, not as a limit."""

from __future__ import annotations

import warnings

import kdist

import keras
import pytest
from keras import layers


def mixer(alltoall: bool) -> keras.Model:
    """In two stages: the second gets tokens cut by features, and transposes them."""
    x = inputs = keras.Input((8, 8))
    for stage in range(2):
        y = layers.Permute((2, 1))(x)
        y = layers.Dense(8, name=f"up{stage}")(y)
        y = layers.Dense(8, name=f"down{stage}")(y)
        x = layers.Dense(8, name=f"features{stage}")(x + layers.Permute((2, 1))(y))
    model = keras.Model(inputs, x)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(pipe=2, model=2),
        layout_map={".*kernel": (None, "model")},
        pipeline=kdist.PipelineConfig(micro_batches=2),
        enable_alltoall=alltoall,
    )
    kdist.parallelize(model, config).compile("sgd", "mse")
    return model


@pytest.mark.parametrize("alltoall", [False, True])
def test_an_all_to_all_that_is_ruled_out_is_told_with_the_setting(alltoall: bool) -> None:
    model = mixer(alltoall)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kdist.inspect(model)
    said = " ".join(str(one.message) for one in told)
    assert "cannot expand" not in said
    assert ("enable_alltoall=False rules out the all-to-all of" in said) is not alltoall
    assert ("set it to True" in " ".join(model.plan(batch_size=4).notes)) is not alltoall
