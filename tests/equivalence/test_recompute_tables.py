"""Recompute in models with tables: on the device or elsewhere, looked up more than once."""

from __future__ import annotations

import dataclasses
from typing import Any

import kdist

import keras
import pytest

from .case import CLASSES
from .harness import compare
from .host_tables import ROWS, TABLES, on_host
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_lazy_optimizers import several
from .test_prefetch import STEPS, ahead, some_ahead
from .test_split_tables import split

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


def _distributed() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    words = kdist.layers.TableConfig("words", ROWS, 8, placement="host", combiner="sum")
    names = kdist.layers.TableConfig("names", ROWS, 8)
    features = [
        kdist.layers.FeatureConfig("tokens", words, (None, 6), (None, 8)),
        kdist.layers.FeatureConfig("tags", words, (None, 2), (None, 8)),
        kdist.layers.FeatureConfig("names", names, (None, 2), (None, 8)),
    ]
    rows = kdist.layers.DistributedEmbedding(features, name="tables")([tokens, tags, tags])
    x = keras.layers.Concatenate()(rows)
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(x), name="tables")


DISTRIBUTED = dataclasses.replace(TABLES, name="distributed", build=_distributed)
STATE_ON_HOST = kdist.OptimizerConfig(level=3, threshold_kb=0, state_on="host")
ELSEWHERE: dict[str, dict[str, Any]] = {
    "host": {"declare": on_host},
    "split": {},
    "distributed": {"case": DISTRIBUTED},
    "state": {"config": {"optimizer": STATE_ON_HOST}},
    "lazy": {"optimizer": several("adam"), "declare": on_host},
    "prefetch": {"optimizer": OPTIMIZERS["sgd"], "features": [STEPS], "declare": ahead},
    "lazy_prefetch": {"optimizer": several("adam"), "features": [STEPS], "declare": some_ahead},
}
AXES: dict[str, dict[str, int]] = {
    "data2": {"data": 2},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}


@pytest.mark.parametrize(
    ("where", "plan", "mesh"),
    spread(product(ELSEWHERE, AGAIN, AXES), [("host", "full", "data2")], quick=0),
)
def test_tables_elsewhere(where: str, plan: str, mesh: str, trained: list[keras.Model]) -> None:
    options = dict(ELSEWHERE[where])
    config = {**options.pop("config", {}), "recompute": AGAIN[plan]}
    if "pipe" in mesh:
        config["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    if where == "split":
        options["declare"] = split(mesh, "data")
    case, optimizer = options.pop("case", TABLES), options.pop("optimizer", OPTIMIZERS["adam"])
    compare(case, AXES[mesh], optimizer=optimizer, config=config, **options)
    assert any(note.startswith(f"recompute ({plan})") for note in trained[-1].plan().notes)
