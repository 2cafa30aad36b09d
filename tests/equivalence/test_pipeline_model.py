"""Pipelines whose stages are cut over an inner axis equal one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .optimizer_zoo import OPTIMIZERS
from .test_pipeline import (
    CASES,
    DEEP,
    DENSE,
    DROPOUT,
    MASKED,
    SHARED_STATE,
    TIED,
    optimizer_config,
    pipeline,
)

CUT = {
    **CASES,
    "deep": DEEP,
    "tied_rows": TIED,
    "tied_columns": dataclasses.replace(
        TIED, layout_map={**DENSE, "table/embeddings": (None, "model")}
    ),
    "dropout": dataclasses.replace(
        DROPOUT, layout_map={"head/kernel": ("model", None)}, has_batchnorm=True
    ),
    "masked": dataclasses.replace(
        MASKED,
        layout_map={
            "dense/kernel": (None, "model"),
            "dense/bias": ("model",),
            "head/kernel": ("model", None),
        },
    ),
    "shared_state": dataclasses.replace(
        SHARED_STATE, layout_map={"dense[02]/kernel": ("model", None)}
    ),
}

ROWS: tuple[tuple[Any, ...], ...] = (
    # name, stages, data, model, micro-batches, schedule, level, accumulation, optimizer, feature,
    # precision
    ("deep", 2, 2, 2, 3, "1f1b", 1, 2, "adam", "none", "float64"),
    ("tied_rows", 2, 1, 2, 2, "zero_bubble", 0, 1, "adam", "none", "float64"),
    ("mlp", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
    ("mlp", 2, 2, 2, 3, "gpipe", 0, 1, "adam", "none", "float64"),
    ("gpt", 2, 1, 2, 4, "gpipe", 0, 1, "adam", "none", "float64"),
    ("gpt", 2, 2, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
    ("gpt_tied", 2, 2, 2, 2, "1f1b", 1, 1, "adam", "none", "float64"),
    ("tied_rows", 2, 2, 2, 2, "1f1b", 1, 1, "adam", "none", "float64"),
    ("tied_columns", 2, 2, 2, 2, "interleaved", 0, 1, "adam", "none", "float64"),
    ("deep", 4, 1, 2, 4, "1f1b", 0, 1, "lamb", "none", "float64"),
    ("deep", 2, 1, 4, 4, "interleaved", 0, 1, "adam", "none", "float64"),
    ("deep", 2, 2, 2, 3, "interleaved", 3, 1, "adam", "kernel_regularizer", "float64"),
    ("tied_rows", 2, 2, 2, 3, "interleaved", 3, 2, "adam", "none", "float64"),
    ("mlp", 2, 2, 2, 2, "zero_bubble", 2, 1, "adam", "none", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 3, 1, "adam", "none", "float64"),
    ("mlp", 2, 1, 2, 2, "1f1b", 0, 2, "adam", "none", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 1, 1, "loss_scale_sgd", "none", "mixed_float16"),
    ("mlp", 2, 1, 2, 2, "1f1b", 0, 1, "sgd_momentum", "none", "mixed_bfloat16"),
    ("mlp", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "kernel_regularizer", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "adam", "activity_regularizer", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "adam", "add_loss", "float64"),
    ("masked", 2, 2, 2, 3, "1f1b", 0, 1, "adam", "mean_with_sample_weight", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "lamb", "global_clipnorm", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "adam", "frozen", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "adamw", "ema", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "adam", "own_compute_metrics", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "adam", "three_steps_per_execution", "float64"),
    ("mlp", 2, 2, 2, 2, "1f1b", 0, 1, "muon", "none", "float64"),
    ("shared_state", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
    ("resnet", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
    ("encoder", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "sample_weight", "float64"),
    ("two_tower", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
    ("dlrm", 2, 2, 2, 2, "1f1b", 0, 1, "sgd_momentum", "clipnorm", "float64"),
    ("lstm", 2, 1, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
    ("recurrent", 3, 1, 2, 2, "1f1b", 0, 1, "adam", "none", "float64"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    (
        "name",
        "stages",
        "data",
        "model",
        "micro_batches",
        "schedule",
        "level",
        "accumulation",
        "optimizer",
        "feature",
        "precision",
    ),
    ROWS,
    ids=lambda value: str(value),
)
def test_stages_on_meshes_equal_one_device(
    name: str,
    stages: int,
    data: int,
    model: int,
    micro_batches: int,
    schedule: str,
    level: int,
    accumulation: int,
    optimizer: str,
    feature: str,
    precision: str,
    engine: str,
) -> None:
    options = {} if accumulation == 1 else {"gradient_accumulation_steps": accumulation}
    compare(
        CUT[name],
        {"pipe": stages, "data": data, "model": model},
        optimizer=lambda **more: OPTIMIZERS[optimizer](**options, **more),
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
