"""A model whose tables are on the host equals one plain device, with every optimizer."""

from __future__ import annotations

from typing import Any

import kdist

import pytest

from .features import BY_NAME as FEATURES
from .harness import Run, compare, reference_engine, train_batches
from .host_tables import FROZEN, SUBCLASSED, TABLES, on_host
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check
from .test_split_tables import split

PLACES = {"host": on_host, "split": split("data2", "data")}
HOSTED = ("data2", "data4", "model2", "data2_model2")
DEFAULT = [
    ("sgd_momentum", "level0", "data2"),
    ("adam", "level3", "data2_model2"),
]


@pytest.mark.parametrize(
    ("optimizer", "level", "mesh"),
    spread(product(("sgd_momentum", "adam", "adagrad"), LEVELS, HOSTED), DEFAULT),
)
def test_levels(optimizer: str, level: str, mesh: str) -> None:
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=level_config(level),
        declare=on_host,
    )


FEATURED = (
    "gradient_accumulation",
    "global_clipnorm",
    "clipvalue",
    "ema_overwrite",
    "weight_decay",
    "sample_weight",
    "own_compute_loss",
    "steps_per_execution",
    "run_eagerly",
)


@pytest.mark.parametrize(
    ("feature", "mesh"),
    spread(product(FEATURED, ("data2", "data2_model2")), []),
)
def test_features(feature: str, mesh: str) -> None:
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        features=[FEATURES[feature]],
        declare=on_host,
    )


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    compare(TABLES, MESHES["data2"], optimizer=OPTIMIZERS[optimizer], declare=on_host)


@pytest.mark.parametrize(("level", "mesh"), spread(product(LEVELS, HOSTED), [("level3", "data2")]))
def test_subclassed(level: str, mesh: str) -> None:
    compare(
        SUBCLASSED,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=level_config(level),
        declare=on_host,
    )


STAGED_MESHES = {
    "pipe2": {"pipe": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
STAGED = product(("1f1b", "zero_bubble"), ("level0", "level3"), STAGED_MESHES)


@pytest.mark.parametrize(
    ("schedule", "level", "mesh"), spread(STAGED, [("1f1b", "level0", "pipe2_data2")])
)
def test_pipelines(schedule: Any, level: str, mesh: str) -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule=schedule)
    compare(
        TABLES,
        STAGED_MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": pipeline, **level_config(level)},
        declare=on_host,
    )


@pytest.mark.parametrize(
    ("place", "level", "mesh"),
    spread(
        product(PLACES, ("level0", "level3"), ("pipe2_data2", "pipe2_data2_model2")),
        [
            ("host", "level0", "pipe2_data2"),
            ("split", "level0", "pipe2_data2"),
            ("host", "level3", "pipe2_data2_model2"),
        ],
    ),
)
def test_a_table_that_does_not_train_in_a_stage(place: str, level: str, mesh: str) -> None:
    compare(
        FROZEN,
        STAGED_MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": kdist.PipelineConfig(micro_batches=2), **level_config(level)},
        declare=PLACES[place],
    )


@pytest.mark.long
@pytest.mark.parametrize("mesh", STAGED_MESHES)
@pytest.mark.parametrize("feature", ["own_compute_loss", "gradient_accumulation", "run_eagerly"])
def test_features_in_pipelines(feature: str, mesh: str) -> None:
    compare(
        TABLES,
        STAGED_MESHES[mesh],
        optimizer=OPTIMIZERS["sgd_momentum"],
        config={"pipeline": kdist.PipelineConfig(micro_batches=2)},
        features=[FEATURES[feature]],
        declare=on_host,
    )


@pytest.mark.long
@pytest.mark.parametrize("mesh", STAGED_MESHES)
def test_batches_of_any_size_in_pipelines(mesh: str) -> None:
    run = Run(
        case=TABLES,
        mesh_axes=STAGED_MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": kdist.PipelineConfig(micro_batches=2)},
        declare=on_host,
    )
    expected = train_batches(run, reference_engine(run), SIZES)
    actual = train_batches(run, "kdist", SIZES)
    check(expected, actual, TOLERANCES[run.dtype], title=run.title)


SIZES = (8, 7, 8, 3, 1, 6)
"""Of batches: parts of unequal size, a replica without rows, and steps for unknown sizes."""


@pytest.mark.parametrize(
    ("level", "mesh"),
    spread(product(("level0", "level3"), HOSTED), [("level0", "data2")]),
)
def test_batches_of_any_size(level: str, mesh: str) -> None:
    run = Run(
        case=TABLES,
        mesh_axes=MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=level_config(level),
        declare=on_host,
    )
    expected = train_batches(run, reference_engine(run), SIZES)
    actual = train_batches(run, "kdist", SIZES)
    check(expected, actual, TOLERANCES[run.dtype], title=run.title)


FROZEN_ROWS = product(PLACES, ("level0", "level3"), ("data2", "data2_model2"))


@pytest.mark.parametrize(
    ("place", "level", "mesh"), spread(FROZEN_ROWS, [("host", "level0", "data2_model2")])
)
def test_a_table_that_does_not_train(place: str, level: str, mesh: str) -> None:
    compare(
        FROZEN,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=level_config(level),
        declare=PLACES[place],
    )


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data2", "data2_model2"])
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_precision(dtype: str, mesh: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "declare": on_host}
    compare(TABLES, MESHES[mesh], optimizer=OPTIMIZERS["sgd_momentum"], **options)
