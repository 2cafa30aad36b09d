"""A model whose tables are split by hand, unevenly, equals one plain device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import kdist

import keras
import pytest

from .features import BY_NAME as FEATURES
from .harness import Run, compare, reference_engine, train_batches
from .host_tables import SUBCLASSED, TABLES
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check

STAGED = {
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
EXPERTS = {"data2_expert2": {"data": 2, "expert": 2}}


def split(mesh: str, axis: str) -> Callable[[keras.Model], None]:
    """Splits every table over an axis: unevenly, and of four devices the first has no rows."""
    size = {**MESHES, **STAGED, **EXPERTS}[mesh][axis]

    def declare(model: keras.Model) -> None:
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.Embedding):
                rows = [0 if i == 0 and size > 2 else 2 + i for i in range(size)]
                rows[-2] += layer.input_dim - sum(rows)
                kdist.shard(layer, manual_split=tuple(rows), axis=axis)

    return declare


SPLIT = [
    ("data", "data2"),
    ("data", "data4"),
    ("model", "model4"),
    ("model", "data2_model2"),
    ("data", "data2_model2"),
]
ROWS = [
    (optimizer, level, *where)
    for optimizer, level in product(("sgd_momentum", "adam", "adagrad"), LEVELS)
    for where in SPLIT
]
DEFAULT = [
    ("adam", "level3", "data", "data2_model2"),
    ("sgd_momentum", "level0", "model", "model4"),
]


@pytest.mark.parametrize(("optimizer", "level", "axis", "mesh"), spread(ROWS, DEFAULT))
def test_levels(optimizer: str, level: str, axis: str, mesh: str) -> None:
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=level_config(level),
        declare=split(mesh, axis),
    )


WAYS = pytest.mark.parametrize("alltoall", [True, False], ids=["blocks", "masked"])


def way(alltoall: bool, level: str = "level0") -> dict[str, Any]:
    """Rows are looked up where they are asked for, or masked and summed."""
    return {"enable_alltoall": alltoall, **level_config(level)}


@pytest.mark.parametrize(
    ("optimizer", "level", "axis", "mesh"),
    spread(
        [
            (*row, *where)
            for row in product(("adam", "sgd"), ("level0", "level2", "level3"))
            for where in SPLIT
        ],
        [("sgd", "level2", "data", "data4"), ("adam", "level0", "model", "data2_model2")],
    ),
)
def test_blocks(optimizer: str, level: str, axis: str, mesh: str) -> None:
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=way(True, level),
        declare=split(mesh, axis),
    )


@pytest.mark.long
@pytest.mark.parametrize(("axis", "mesh"), SPLIT)
def test_subclassed(axis: str, mesh: str) -> None:
    compare(SUBCLASSED, MESHES[mesh], optimizer=OPTIMIZERS["adam"], declare=split(mesh, axis))


FEATURED = ("gradient_accumulation", "global_clipnorm", "own_compute_loss", "run_eagerly")


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("feature", FEATURED)
@pytest.mark.parametrize(("axis", "mesh"), SPLIT)
def test_features(feature: str, axis: str, mesh: str, alltoall: bool) -> None:
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        features=[FEATURES[feature]],
        config=way(alltoall),
        declare=split(mesh, axis),
    )


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    declare = split("data2", "data")
    compare(TABLES, MESHES["data2"], optimizer=OPTIMIZERS[optimizer], declare=declare)


@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    ],
    ids=["averages", "clipped_sums"],
)
def test_a_part_without_rows(options: dict[str, Any]) -> None:
    optimizer = functools.partial(OPTIMIZERS["adam"], **options)
    compare(TABLES, MESHES["data4"], optimizer=optimizer, declare=split("data4", "data"))


SIZES = (8, 7, 8, 3, 1, 6)


@pytest.mark.parametrize(
    ("alltoall", "axis", "mesh"),
    spread([(way, *where) for way in (True, False) for where in SPLIT], [(True, "data", "data2")]),
)
def test_batches_of_any_size(alltoall: bool, axis: str, mesh: str) -> None:
    run = Run(
        case=TABLES,
        mesh_axes=MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=way(alltoall),
        declare=split(mesh, axis),
    )
    expected = train_batches(run, reference_engine(run), SIZES)
    actual = train_batches(run, "kdist", SIZES)
    check(expected, actual, TOLERANCES[run.dtype], title=run.title)


@pytest.mark.long
@pytest.mark.parametrize(
    ("axis", "mesh"), [("data", "pipe2_data2"), *product(("data", "model"), ["pipe2_data2_model2"])]
)
@WAYS
@pytest.mark.parametrize("level", ["level0", "level3"])
def test_pipelines(level: str, alltoall: bool, axis: str, mesh: str) -> None:
    config = {"pipeline": kdist.PipelineConfig(micro_batches=2), **way(alltoall, level)}
    compare(
        TABLES,
        STAGED[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=config,
        declare=split(mesh, axis),
    )


@pytest.mark.parametrize(
    ("alltoall", "level"), spread([(True, 0), (True, 3), (False, 0)], [(True, 0)], quick=0)
)
def test_an_inner_axis_of_any_name(alltoall: bool, level: int) -> None:
    """Experts' devices hold parts of tables too."""
    compare(
        TABLES,
        EXPERTS["data2_expert2"],
        optimizer=OPTIMIZERS["adam"],
        config=way(alltoall, f"level{level}"),
        declare=split("data2_expert2", "expert"),
    )


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("where", [("data", "data2"), ("model", "data2_model2")])
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_precision(dtype: str, where: tuple[str, str], alltoall: bool) -> None:
    axis, mesh = where
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS["sgd_momentum"],
        dtype=dtype,
        config=way(alltoall),
        declare=split(mesh, axis),
    )
