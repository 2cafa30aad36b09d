"""Losses that replicas cannot compute part by part equal one device."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_levels import config
from .whole_losses import BY_NAME, COUPLED, WEIGHTED

# Examples and batch size: parts of one size; parts that differ, and a batch with less rows than
# replicas.
SIZES = {"even": (16, 8), "ragged": (13, 5)}

DEFAULT = [
    ("dice", "data4", "ragged"),
    ("circle", "data4", "even"),
    ("one_of_two", "data2_model2", "ragged"),
    ("projection", "data4", "ragged"),
]
DEFAULT_LEVELS = [("centres", 2, "data4"), ("kernel_penalty", 3, "data2_model2")]
DEFAULT_FEATURES = [("unreduced", "sample_weight", "data4")]


def _run(name: str, mesh: str, sizes: str, engine: str, **options: Any) -> None:
    samples, batch_size = SIZES[sizes]
    options.setdefault("optimizer", OPTIMIZERS["adam"])
    compare(
        BY_NAME[name],
        MESHES[mesh],
        engine=engine,
        samples=samples,
        batch_size=batch_size,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "mesh", "sizes"), spread(product(BY_NAME, ("data4", "data2_model2"), SIZES), DEFAULT)
)
def test_loss_equals_one_device(name: str, mesh: str, sizes: str, engine: str) -> None:
    _run(name, mesh, sizes, engine)


@pytest.mark.parametrize(
    ("name", "level", "mesh"),
    spread(
        product([*(case.name for case in WEIGHTED), "dice"], (1, 2, 3), ("data4", "data2_model2")),
        DEFAULT_LEVELS,
    ),
)
def test_loss_at_every_level(name: str, level: int, mesh: str, engine: str) -> None:
    _run(name, mesh, "ragged", engine, config=config(level))


COMPOSED = (
    "sample_weight",
    "reduction_sum",
    "mean_with_sample_weight",
    "add_loss",
    "kernel_regularizer",
    "activity_regularizer",
    "gradient_accumulation",
    "global_clipnorm",
    "steps_per_execution",
    "run_eagerly",
)


@pytest.mark.parametrize(
    ("name", "feature", "mesh"),
    spread(
        product(
            ("dice", "root_mean_square", "unreduced", "one_of_two", "shared_centres"),
            COMPOSED,
            ("data4", "data2_model2"),
        ),
        DEFAULT_FEATURES,
    ),
)
def test_loss_composes(name: str, feature: str, mesh: str, engine: str) -> None:
    _run(name, mesh, "ragged", engine, features=[FEATURES[feature]])


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in (*COUPLED, *WEIGHTED)])
@pytest.mark.parametrize("dtype", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_loss_with_a_loss_scale(name: str, dtype: str, engine: str) -> None:
    def optimizer(**options: Any) -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](**options), 256.0)

    _run(name, "data4", "even", engine, optimizer=optimizer, dtype=dtype)
