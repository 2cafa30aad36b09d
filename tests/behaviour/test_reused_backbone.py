"""A backbone that one model has trained, in another one: each goes on where the other left it.

Levels spread weights over replicas in ways of their own; whichever model is compiled last moves
them.
"""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

MESHES: dict[str, dict[str, int]] = {
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}
LEVELS = [(3, 3), (0, 3), (3, 0), (1, 3), (3, 1)]
X = np.random.default_rng(0).normal(size=(20, 6))
Y = np.random.default_rng(1).normal(size=(20, 4))
LABELS = np.random.default_rng(2).normal(size=(20, 3))
STAGES = {"dense_a": 0, "dense_b|dense_c|head": 1}


def parallel(model: keras.Model, mesh: str | None, level: int) -> keras.Model:
    if mesh is None:
        return model
    axes, options = MESHES[mesh], {}
    if "pipe" in axes:
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2, stages=STAGES)
    if "model" in axes:
        options["layout_map"] = {"dense_./kernel": (None, "model")}
    spread = kdist.OptimizerConfig(level=level, threshold_kb=0)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=spread, **options)
    return kdist.parallelize(model, config)


def trained(mesh: str | None, levels: tuple[int, int]) -> list[Any]:
    """What two models with one backbone predict and weigh, after several turns."""
    keras.utils.set_random_seed(0)
    settings: dict[str, Any] = {"batch_size": 10, "shuffle": False, "verbose": 0}
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="dense_a")(inputs)
    x = layers.Dense(8, "tanh", name="dense_b")(x)
    first = parallel(keras.Model(inputs, layers.Dense(4, name="dense_c")(x)), mesh, levels[0])
    first.compile(keras.optimizers.Adam(0.01), "mse")
    first.fit(X, Y, **settings)
    second = parallel(keras.Model(inputs, layers.Dense(3, name="head")(x)), mesh, levels[1])
    found = [second.predict(X, verbose=0)]
    first.fit(X, Y, **settings)  # the second has not been compiled
    second.compile(keras.optimizers.AdamW(0.01), "mse")
    second.fit(X, LABELS, **settings)
    found += [first.predict(X, verbose=0), first.evaluate(X, Y, verbose=0)]
    first.compile(keras.optimizers.Adam(0.01), "mse")
    first.fit(X, Y, **settings)
    return [*found, second.predict(X, verbose=0), *first.get_weights(), *second.get_weights()]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("levels", LEVELS, ids=lambda levels: "{}_then_{}".format(*levels))
@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_device(mesh: str, levels: tuple[int, int]) -> None:
    expected = trained(None, levels)
    for one, other in zip(trained(mesh, levels), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


WITH_COPIES: dict[str, tuple[dict[str, int], kdist.OptimizerConfig]] = {
    "inner": (MESHES["data2_model2"], kdist.OptimizerConfig()),
    "host": (MESHES["data4"], kdist.OptimizerConfig(state_on="host")),
}


def in_turn(way: str, kinds: tuple[Any, Any]) -> list[Any]:
    """What two models with one backbone weigh, whose optimizers see whole tensors, or one does."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="dense_a")(inputs)
    x = layers.Dense(8, "tanh", name="dense_b")(x)
    models = [keras.Model(inputs, layers.Dense(n, name=f"head{n}")(x)) for n in (4, 3)]
    for model in models:
        if way:
            axes, spread = WITH_COPIES[way]
            cuts = {"dense_./kernel": (None, "model")} if "model" in axes else None
            mesh = kdist.mesh(**axes)
            kdist.parallelize(
                model, kdist.ParallelConfig(mesh=mesh, optimizer=spread, layout_map=cuts)
            )
    losses = []
    for turn, step in enumerate((0, 1, 0, 0, 1, 1, 0)):
        if turn < 2:  # the second when the first has trained, whose copies stay its own
            models[step].compile(kinds[step](0.01), "mse")
        losses.append(models[step].train_on_batch(X[:10], (Y, LABELS)[step][:10]))
    return [*losses, *(w for model in models for w in model.get_weights())]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kinds", [("Lamb", "Adam"), ("Adam", "Muon"), ("Lamb", "Adafactor")])
@pytest.mark.parametrize("way", WITH_COPIES)
def test_whole_copies_follow_the_other_model(way: str, kinds: tuple[str, str]) -> None:
    classes = tuple(getattr(keras.optimizers, kind) for kind in kinds)
    expected = in_turn("", classes)
    for one, other in zip(in_turn(way, classes), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
