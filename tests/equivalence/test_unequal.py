"""Batches that the replicas cannot share evenly, or not at all."""

from __future__ import annotations

import kdist

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME

# 13 over batches of 8 on 4 replicas: 2,2,2,2 then 2,1,1,1. 11 on 8: the last batch of 3 leaves five
# replicas without an example. 3 in all on 4: no batch ever fills the mesh.
SHAPES = {"13_by_8_on_4": (13, 8, 4), "11_by_8_on_8": (11, 8, 8), "3_by_8_on_4": (3, 8, 4)}
ROWS = [
    (name, shape, feature)
    for name in BY_NAME
    for shape in SHAPES
    for feature in ("none", "sample_weight", "reduction_sum", "add_loss", "activity_regularizer")
    if FEATURES[feature].fits(BY_NAME[name])
]
DEFAULT = [
    ("mlp", "11_by_8_on_8", "add_loss"),
    ("mlp", "3_by_8_on_4", "reduction_sum"),
    ("resnet", "11_by_8_on_8", "none"),
]


@pytest.mark.parametrize(("name", "shape", "feature"), spread(ROWS, DEFAULT))
def test_uneven_batches_equal_one_device(name: str, shape: str, feature: str, engine: str) -> None:
    samples, batch_size, replicas = SHAPES[shape]
    compare(
        BY_NAME[name],
        {"data": replicas},
        optimizer=OPTIMIZERS["sgd_momentum"],
        engine=engine,
        samples=samples,
        batch_size=batch_size,
        features=(FEATURES[feature],),
    )


FEATURES_IN_STAGES = ("none", "sample_weight", "reduction_sum", "add_loss", "activity_regularizer")
STAGES = {
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


@pytest.mark.parametrize(
    ("name", "mesh", "feature"),
    spread(
        [
            row
            for row in product(BY_NAME, STAGES, FEATURES_IN_STAGES)
            if FEATURES[row[2]].fits(BY_NAME[row[0]])
        ],
        [("mlp", "pipe2_data2", "sample_weight")],
    ),
)
def test_a_replica_of_stages_without_rows(name: str, mesh: str, feature: str) -> None:
    """Of 9 rows by 8: the last one is in the first micro-batch of the first replica."""
    compare(
        BY_NAME[name],
        STAGES[mesh],
        optimizer=OPTIMIZERS["sgd_momentum"],
        samples=9,
        features=(FEATURES[feature],),
        config={"pipeline": kdist.PipelineConfig(micro_batches=2)},
    )


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_uneven_batches_on_a_two_axis_mesh(name: str, engine: str) -> None:
    compare(
        BY_NAME[name],
        {"data": 2, "model": 2},
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        samples=13,
        batch_size=8,
    )
