"""Recompute in models with tables: on the device or elsewhere, looked up more than once."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest

from .harness import compare
from .host_tables import TABLES
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS

AGAIN: dict[str, kdist.RecomputeConfig] = {
    "full": kdist.RecomputeConfig(layers=["up|down"]),
    "selective": kdist.RecomputeConfig(policy="selective"),
    "budget": kdist.RecomputeConfig(layers=["up|down"], policy="budget", budget_mb=0.1),
}
SCHEDULES = ("1f1b", "zero_bubble", "gpipe")
MESHES: dict[str, dict[str, int]] = {
    "pipe2": {"pipe": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
}


@pytest.mark.parametrize(
    ("plan", "schedule", "mesh"),
    spread(product(AGAIN, SCHEDULES, MESHES), [("full", "1f1b", "pipe2")]),
)
def test_look_ups_on_the_device_in_stages(
    plan: str, schedule: Any, mesh: str, trained: list[keras.Model]
) -> None:
    """A stage's backward function joins the rows of two look-ups in one table."""
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule=schedule)
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"pipeline": pipeline, "recompute": AGAIN[plan]},
    )
    assert any(note.startswith(f"recompute ({plan})") for note in trained[-1].plan().notes)
