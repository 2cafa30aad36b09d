"""Tables split by columns, or with a column of ids for each part, equal one plain device."""

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


COLUMNS = {2: (3, 5), 4: (1, 4, 0, 3)}
KINDS = ("local", "columns")


def case(kind: str, mesh: str, axis: str) -> Case:
    """A model that looks fields up twice, in triples and one by one; repeated ids are common.

    Args:
        kind: "local": column j of the ids is of part j; "columns": parts are of columns.
        mesh: Name of the mesh.
        axis: Of the table.
    """
    parts = {**MESHES, **STAGED}[mesh][axis]

    def build() -> keras.Model:
        ids = keras.Input((3, parts), dtype="int32", name="ids")
        sizes: tuple[Any, Any] = (ROWS[parts], 8) if kind == "local" else (48, COLUMNS[parts])
        table = kdist.layers.SplitEmbedding(*sizes, axis, kind == "local", name="fields")
        x = keras.layers.Flatten()(table(ids))
        last = keras.layers.Flatten()(table(ids[:, -1]))
        x = keras.layers.Concatenate()([x, last])
        x = keras.layers.Dense(16, "gelu", name="up")(x)
        x = keras.layers.Dense(8, name="down")(x)
        return keras.Model(ids, keras.layers.Dense(CLASSES, name="head")(x), name="fields")

    def data(seed: int, samples: int) -> Any:
        rng = np.random.default_rng(seed)
        ends = np.cumsum(ROWS[parts])
        ids = rng.integers(ends - ROWS[parts], ends, (samples, 3, parts))
        return ids.astype("int32"), labels(rng, samples), None

    return Case(name="fields", build=build, data=data, layout_map=FEED_FORWARD)


WHERE = [
    ("data", "data2"),
    ("data", "data4"),
    ("model", "model4"),
    ("model", "data2_model2"),
    ("data", "data2_model2"),
]


@pytest.mark.parametrize(
    ("kind", "optimizer", "level", "axis", "mesh"),
    spread(
        [(*r, *w) for r in product(KINDS, ("sgd", "adam"), ("level0", "level3")) for w in WHERE],
        [
            ("local", "sgd", "level3", "data", "data2_model2"),
            ("local", "adam", "level0", "model", "model4"),
            ("columns", "adam", "level3", "data", "data2_model2"),
            ("columns", "sgd", "level0", "model", "model4"),
        ],
    ),
)
def test_levels(kind: str, optimizer: str, level: str, axis: str, mesh: str) -> None:
    compare(
        case(kind, mesh, axis),
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=level_config(level),
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", ["gradient_accumulation", "global_clipnorm", "run_eagerly"])
@pytest.mark.parametrize(("axis", "mesh"), WHERE)
def test_features(kind: str, feature: str, axis: str, mesh: str) -> None:
    compare(
        case(kind, mesh, axis),
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        features=[FEATURES[feature]],
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axis", "mesh"), WHERE)
def test_batches_of_any_size(kind: str, axis: str, mesh: str) -> None:
    run = Run(case=case(kind, mesh, axis), mesh_axes=MESHES[mesh], optimizer=OPTIMIZERS["adam"])
    sizes = (8, 7, 8, 3, 1, 6)
    expected = train_batches(run, reference_engine(run), sizes)
    check(expected, train_batches(run, "kdist", sizes), TOLERANCES[run.dtype], title=run.title)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    case_ = case("columns", "data2", "data")
    compare(case_, MESHES["data2"], optimizer=OPTIMIZERS[optimizer])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("axis", "mesh"), [("data", "pipe2_data2"), *product(("data", "model"), ["pipe2_data2_model2"])]
)
def test_pipelines(kind: str, axis: str, mesh: str) -> None:
    compare(
        case(kind, mesh, axis),
        STAGED[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": kdist.PipelineConfig(micro_batches=2)},
    )
