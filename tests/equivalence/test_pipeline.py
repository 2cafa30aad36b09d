"""Pipelines equal one device that runs the same micro-batches in order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras
import pytest

from .attention_models import GPT
from .case import CLASSES, TOKENS, VOCABULARY, WIDTH, Case
from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import spread
from .optimizer_zoo import OPTIMIZERS
from .pairwise import Row, cover, pairs_of, spanning
from .zoo import BY_NAME, MLP, RESNET

LAYERS = 8


def _deep() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    for i in range(LAYERS):
        h = keras.layers.Dense(12, activation="tanh", name=f"dense{i}")(x)
        # Skips a layer, so that boundaries carry two tensors wherever the model is cut.
        x = h if i % 2 else keras.layers.Add(name=f"add{i}")([x, h])
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="deep")


def _tied() -> keras.Model:
    """Embedding and head are one table, on the first and on the last stage."""
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, WIDTH, tie_weights=True, name="table")
    x = table(x)
    for i in range(LAYERS):
        x = keras.layers.Dense(WIDTH, activation="tanh", name=f"dense{i}")(x)
    return keras.Model(inputs, table(x, reverse=True), name="tied")


def _dropout() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    x = keras.layers.Dense(12, "tanh", name="first")(x)
    x = keras.layers.Dropout(0.5, seed=7, name="drop0")(x)
    x = keras.layers.BatchNormalization(momentum=0.7, name="norm")(x)
    x = keras.layers.Dropout(0.5, seed=8, name="drop1")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="dropout")


def _shared_state() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    norm = keras.layers.BatchNormalization(momentum=0.7, name="norm")
    for i in range(3):
        x = norm(keras.layers.Dense(12, "tanh", name=f"dense{i}")(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="shared_state")


def _recurrent() -> keras.Model:
    """Its loop gets a gradient from a later stage and gives one to an earlier one."""
    x = inputs = keras.Input((5, 3), name="series")
    x = keras.layers.Dense(4, activation="tanh", name="dense")(x)
    x = keras.layers.LSTM(8, name="lstm")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="recurrent")


def _masked() -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="table")(x)
    x = keras.layers.Dense(WIDTH, activation="tanh", name="dense")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="masked")


DENSE = {
    "dense[0246]/kernel": (None, "model"),
    "dense[0246]/bias": ("model",),
    "dense[1357]/kernel": ("model", None),
}
DEEP = dataclasses.replace(MLP, name="deep", build=_deep, layout_map=DENSE)
TIED = dataclasses.replace(
    GPT,
    name="tied",
    build=_tied,
    zero_gradient_paths=(),
    layout_map={**DENSE, "table/embeddings": ("model", None)},
)
DROPOUT = dataclasses.replace(MLP, name="dropout", build=_dropout, has_batchnorm=True)
SHARED_STATE = dataclasses.replace(
    MLP, name="shared_state", build=_shared_state, has_batchnorm=True
)

MASKED = dataclasses.replace(
    BY_NAME["encoder"], name="masked", build=_masked, zero_gradient_paths=()
)
RECURRENT = dataclasses.replace(BY_NAME["lstm"], name="recurrent", build=_recurrent)
CASES = {**BY_NAME, "masked": MASKED, "recurrent": RECURRENT}

DEVICES, VIRTUAL_STAGES = 8, 8
# Greedy covering depends on the order; with this one the proportions below hold in few rows.
FACTORS = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble"),
    "precision": ("float64", "mixed_float16", "mixed_bfloat16"),
    "level": (0, 1, 2, 3),
    "chunks": (1, 2, 3),
    "model": (1, 2),
    "fusion": ("auto", "none"),
    "data": (1, 2),
    "stages": (2, 4),
    "tied": (True, False),
    "micro_batches": (2, 3, 4),
    "accumulation": (1, 2),
}


def _allowed(row: Row) -> bool:
    """What the machine's devices, the model's layers, and the schedules allow."""
    known = {"schedule", "chunks"} <= set(row)
    if known and (row["schedule"] == "interleaved") != (row["chunks"] > 1):
        return False
    if row.get("level", 0) > 0 and row.get("data", 2) == 1:
        return False  # one replica has nobody to share with
    devices = row.get("stages", 1) * row.get("data", 1) * row.get("model", 1)
    return devices <= DEVICES and row.get("stages", 1) * row.get("chunks", 1) <= VIRTUAL_STAGES


def _cost(row: Row) -> float:
    work = (1 + row["tied"]) * row["stages"] * (1 + row["data"]) * row["micro_batches"]
    # Each part of a stage on a mesh is lowered by itself.
    return work * row["chunks"] * (6 if row["model"] > 1 else 1)


COVERED = cover(FACTORS, _allowed)
ROWS = [tuple(row.values()) for row in COVERED]


def _default() -> list[tuple[Any, ...]]:
    """Every choice at least once: a row for each other precision, the rest in float64."""
    mixed = [
        min((row for row in COVERED if row["precision"] == precision), key=_cost)
        for precision in FACTORS["precision"][1:]
    ]
    exact = [row for row in COVERED if row["precision"] == "float64"]
    hybrid = [{**row, "hybrid": row["data"] > 1 < row["model"]} for row in exact]
    chosen = [*mixed, *spanning(hybrid, _cost, held=mixed)]
    return [tuple(row[name] for name in FACTORS) for row in chosen]


DEFAULT = _default()


def pipeline(**options: Any) -> Any:
    import kdist

    return kdist.PipelineConfig(**options)


def optimizer_config(level: int) -> Any:
    import kdist

    return kdist.OptimizerConfig(level=level, threshold_kb=0)


def fusion_config(mode: str) -> Any:
    import kdist

    return kdist.FusionConfig(mode=mode)


@pytest.mark.parametrize(tuple(FACTORS), spread(ROWS, DEFAULT))
def test_combination_equals_one_device(
    schedule: str,
    precision: str,
    level: int,
    chunks: int,
    model: int,
    fusion: str,
    data: int,
    stages: int,
    tied: bool,
    micro_batches: int,
    accumulation: int,
    engine: str,
) -> None:
    scaled = precision == "mixed_float16"
    options = {} if accumulation == 1 else {"gradient_accumulation_steps": accumulation}
    make = OPTIMIZERS["loss_scale_sgd" if scaled else "adam"]
    if precision == "mixed_bfloat16":
        make = OPTIMIZERS["sgd_momentum"]
    compare(
        TIED if tied else DEEP,
        {"pipe": stages, "data": data} | ({"model": model} if model > 1 else {}),
        optimizer=lambda **more: make(**options, **more),
        engine=engine,
        dtype=precision,
        config={
            "pipeline": pipeline(micro_batches=micro_batches, schedule=schedule, chunks=chunks),
            "optimizer": optimizer_config(level),
            "fusion": fusion_config(fusion),
        },
    )


MODELS = (
    ("masked", 2, 2, 3, "1f1b", "adam", "mean_with_sample_weight"),
    ("gpt", 4, 1, 4, "1f1b", "adam", "none"),
    ("gpt_tied", 2, 2, 2, "1f1b", "lamb", "global_clipnorm"),
    ("gpt_tied", 2, 1, 4, "interleaved", "adam", "none"),
    ("encoder", 3, 2, 3, "1f1b", "adam", "sample_weight"),
    ("encoder", 2, 2, 2, "1f1b", "adam", "mean_with_sample_weight"),
    ("resnet", 2, 1, 4, "1f1b", "adam", "none"),
    ("resnet", 4, 2, 3, "gpipe", "adam", "none"),
    ("lstm", 2, 2, 2, "1f1b", "adam", "none"),
    ("recurrent", 3, 2, 2, "1f1b", "adam", "none"),
    ("recurrent", 3, 1, 2, "zero_bubble", "adam", "none"),
    ("two_tower", 3, 1, 3, "1f1b", "adam", "sample_weight"),
    ("dlrm", 2, 2, 2, "1f1b", "sgd_momentum", "clipnorm"),
    ("shared_mlp", 3, 1, 3, "1f1b", "adafactor", "kernel_regularizer"),
    ("mlp", 3, 2, 3, "zero_bubble", "lamb", "global_clipnorm"),
    ("mlp", 2, 2, 3, "1f1b", "adam", "activity_regularizer"),
    ("mlp", 2, 2, 3, "1f1b", "adam", "add_loss"),
    ("mlp", 2, 2, 3, "1f1b", "adam", "reduction_sum"),
    ("mlp", 2, 2, 3, "1f1b", "adamw", "ema"),
    ("mlp", 2, 2, 3, "1f1b", "multi", "frozen"),
    ("mlp", 2, 2, 3, "1f1b", "adam", "own_compute_metrics"),
    ("mlp", 2, 2, 3, "1f1b", "adam", "three_steps_per_execution"),
    ("mlp", 2, 2, 3, "1f1b", "adam", "loss_scale_factor"),
    ("mlp", 2, 2, 3, "1f1b", "muon", "none"),
)
DEFAULT_MODELS = (
    ("masked", 2, 2, 3, "1f1b", "adam", "mean_with_sample_weight"),
    ("resnet", 2, 1, 4, "1f1b", "adam", "none"),
)


@pytest.mark.parametrize(
    ("name", "stages", "data", "micro_batches", "schedule", "optimizer", "feature"),
    spread(MODELS, DEFAULT_MODELS),
)
def test_model_equals_one_device(
    name: str,
    stages: int,
    data: int,
    micro_batches: int,
    schedule: str,
    optimizer: str,
    feature: str,
    engine: str,
) -> None:
    compare(
        CASES[name],
        {"pipe": stages, "data": data},
        optimizer=OPTIMIZERS[optimizer],
        engine=engine,
        features=(FEATURES[feature],),
        # Neither replicas nor micro-batches divide a batch, and the last one is smaller.
        batch_size=10,
        samples=17,
        config={"pipeline": pipeline(micro_batches=micro_batches, schedule=schedule)},
    )


@pytest.mark.long
@pytest.mark.parametrize("samples", [1, 2, 5, 9])
@pytest.mark.parametrize("case", [DEEP, RESNET], ids=lambda case: case.name)
def test_fewer_rows_than_micro_batches(case: Case, samples: int, engine: str) -> None:
    compare(
        case,
        {"pipe": 2, "data": 2},
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        samples=samples,
        config={"pipeline": pipeline(micro_batches=4)},
    )


@pytest.mark.long
@pytest.mark.parametrize("case", [DROPOUT, SHARED_STATE], ids=lambda case: case.name)
def test_state_goes_from_micro_batch_to_micro_batch(case: Case, engine: str) -> None:
    compare(
        case,
        {"pipe": 2},
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        config={"pipeline": pipeline(micro_batches=4)},
    )


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 8])
def test_one_stage_and_eight(stages: int, engine: str) -> None:
    compare(
        DEEP,
        {"pipe": stages},
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        config={"pipeline": pipeline(micro_batches=2)},
    )


@pytest.mark.parametrize("rows", [ROWS, DEFAULT], ids=["all", "default"])
def test_the_rows_are_ones_that_can_tell(rows: list[tuple[Any, ...]]) -> None:
    """Mixed precision compares losses alone; a level does nothing on one replica."""
    named = [dict(zip(FACTORS, row)) for row in rows]
    levels = [row for row in named if row["level"] > 0]
    assert all(row["data"] > 1 for row in levels)
    for some in (named, levels):
        assert 2 * sum(row["precision"] == "float64" for row in some) >= len(some)
        assert 2 * sum(row["tied"] for row in some) >= len(some)
    assert any(
        row["data"] > 1 < row["model"] and row["precision"] == "float64" and row["level"] > 0
        for row in named
    )


def test_the_default_rows_are_few_and_reach_every_choice() -> None:
    assert len(DEFAULT) <= 7
    for position, values in enumerate(FACTORS.values()):
        assert {row[position] for row in DEFAULT} == set(values)


def test_every_allowed_pair_is_in_a_row() -> None:
    held = set().union(*(pairs_of(row) for row in COVERED))
    pairs = itertools.combinations(FACTORS.items(), 2)
    items = [((a, x), (b, y)) for (a, xs), (b, ys) in pairs for x in xs for y in ys]
    missing = {pair for pair in items if pair not in held}
    # 4 stages on 2 devices each leave none for a second replica, and so for a level.
    alone = {pair for pair in items if not _allowed(dict(pair))}
    assert missing == alone
