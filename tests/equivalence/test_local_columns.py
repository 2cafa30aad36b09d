"""Tables of which each part has a column of the ids of its own equal one plain device."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

from .case import CLASSES, FEED_FORWARD, Case, labels
from .features import BY_NAME as FEATURES
from .harness import Run, compare, reference_engine, train_batches
from .matrix import MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check

ROWS = {2: (5, 43), 4: (1, 20, 3, 24)}
STAGED = {
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


def case(parts: int, axis: str) -> Case:
    """A model that looks columns up twice, in pairs and one by one; repeated ids are common."""

    def build() -> keras.Model:
        ids = keras.Input((3, parts), dtype="int32", name="ids")
        table = kdist.layers.SplitEmbedding(ROWS[parts], 8, axis, local_columns=True, name="fields")
        x = keras.layers.Flatten()(table(ids))
        last = keras.layers.Flatten()(table(ids[:, -1]))
        x = keras.layers.Concatenate()([x, last])
        x = keras.layers.Dense(16, "gelu", name="up")(x)
        x = keras.layers.Dense(8, name="down")(x)
        return keras.Model(ids, keras.layers.Dense(CLASSES, name="head")(x), name="columns")

    def data(seed: int, samples: int) -> Any:
        rng = np.random.default_rng(seed)
        ends = np.cumsum(ROWS[parts])
        ids = rng.integers(ends - ROWS[parts], ends, (samples, 3, parts))
        return ids.astype("int32"), labels(rng, samples), None

    return Case(name="columns", build=build, data=data, layout_map=FEED_FORWARD)


def parts(mesh: str, axis: str) -> int:
    return {**MESHES, **STAGED}[mesh][axis]


WHERE = [
    ("data", "data2"),
    ("data", "data4"),
    ("model", "model4"),
    ("model", "data2_model2"),
    ("data", "data2_model2"),
]


@pytest.mark.parametrize(
    ("optimizer", "level", "axis", "mesh"),
    spread(
        [(*row, *w) for row in product(("sgd", "adam"), ("level0", "level3")) for w in WHERE],
        [("sgd", "level3", "data", "data2_model2"), ("adam", "level0", "model", "model4")],
    ),
)
def test_levels(optimizer: str, level: str, axis: str, mesh: str) -> None:
    compare(
        case(parts(mesh, axis), axis),
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=level_config(level),
    )


@pytest.mark.long
@pytest.mark.parametrize("feature", ["gradient_accumulation", "global_clipnorm", "run_eagerly"])
@pytest.mark.parametrize(("axis", "mesh"), WHERE)
def test_features(feature: str, axis: str, mesh: str) -> None:
    compare(
        case(parts(mesh, axis), axis),
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        features=[FEATURES[feature]],
    )


@pytest.mark.long
@pytest.mark.parametrize(("axis", "mesh"), WHERE)
def test_batches_of_any_size(axis: str, mesh: str) -> None:
    run = Run(
        case=case(parts(mesh, axis), axis), mesh_axes=MESHES[mesh], optimizer=OPTIMIZERS["adam"]
    )
    sizes = (8, 7, 8, 3, 1, 6)
    expected = train_batches(run, reference_engine(run), sizes)
    check(expected, train_batches(run, "kdist", sizes), TOLERANCES[run.dtype], title=run.title)


@pytest.mark.long
@pytest.mark.parametrize(
    ("axis", "mesh"), [("data", "pipe2_data2"), *product(("data", "model"), ["pipe2_data2_model2"])]
)
def test_pipelines(axis: str, mesh: str) -> None:
    compare(
        case(parts(mesh, axis), axis),
        STAGED[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": kdist.PipelineConfig(micro_batches=2)},
    )
