"""Pipelines whose stages are cut over an inner axis equal one device."""

from __future__ import annotations

from typing import Any

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import spread
from .optimizer_zoo import OPTIMIZERS
from .test_pipeline import CASES, optimizer_config, pipeline

ROWS: tuple[tuple[Any, ...], ...] = (
    # name, stages, data, model, micro-batches, schedule, level, optimizer, feature, precision
    ("mlp", 2, 1, 2, 2, "1f1b", 0, "adam", "none", "float64"),
    ("mlp", 2, 2, 2, 3, "gpipe", 0, "adam", "none", "float64"),
    ("gpt", 2, 1, 2, 4, "gpipe", 0, "adam", "none", "float64"),
    ("gpt", 2, 2, 2, 2, "1f1b", 0, "adam", "none", "float64"),
)
DEFAULT = ROWS


@pytest.mark.parametrize(
    (
        "name",
        "stages",
        "data",
        "model",
        "micro_batches",
        "schedule",
        "level",
        "optimizer",
        "feature",
        "precision",
    ),
    spread(ROWS, DEFAULT),
)
def test_stages_on_meshes_equal_one_device(
    name: str,
    stages: int,
    data: int,
    model: int,
    micro_batches: int,
    schedule: str,
    level: int,
    optimizer: str,
    feature: str,
    precision: str,
    engine: str,
) -> None:
    compare(
        CASES[name],
        {"pipe": stages, "data": data, "model": model},
        optimizer=OPTIMIZERS[optimizer],
        engine=engine,
        dtype=precision,
        features=(FEATURES[feature],),
        # Neither replicas nor micro-batches divide a batch, and the last one is smaller.
        batch_size=10,
        samples=17,
        config={
            "pipeline": pipeline(micro_batches=micro_batches, schedule=schedule),
            "optimizer": optimizer_config(level),
        },
    )
