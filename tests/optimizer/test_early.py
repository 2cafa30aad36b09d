"""Which optimizers need all sums of a step before any update, and what a step's work says of it."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.optimizer import early
from kdist.optimizer.early import needs_all
from kdist.pipeline import Reduce, Update
from kdist.runtime import step

import keras
import numpy as np
import pytest

KEEN: dict[str, Any] = {
    "adam": lambda: keras.optimizers.Adam(),
    "clips each": lambda: keras.optimizers.Adam(clipnorm=1.0),
    "sharded": lambda: kdist.ShardedOptimizer(keras.optimizers.SGD(), level=2),
}
PATIENT: dict[str, Any] = {
    "clips all": lambda: keras.optimizers.Adam(global_clipnorm=1.0),
    "accumulates": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "scales": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "sharded": lambda: kdist.ShardedOptimizer(
        keras.optimizers.SGD(global_clipnorm=1.0), level=2, threshold_kb=0
    ),
}


def stack() -> keras.Model:
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(6)]
    return keras.Sequential([keras.Input((64,)), *layers])


@pytest.mark.parametrize(
    ("make", "waits"), [(m, False) for m in KEEN.values()] + [(m, True) for m in PATIENT.values()]
)
def test_what_needs_all_sums(make: Any, waits: bool) -> None:
    assert needs_all(make(), stack().trainable_variables) is waits


MESHES = [{"data": 2}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2}]


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("name", ["clips each", "clips all", "accumulates", "scales"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sums_wait_for_the_updates_that_the_work_names(
    name: str, axes: dict[str, int], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=3)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map={".*kernel": (None, "model")} if "model" in axes else {},
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        fusion=kdist.FusionConfig(mode="none"),
        pipeline=schedule if "pipe" in axes else None,
    )
    model = kdist.parallelize(stack(), config)
    model.compile((KEEN | PATIENT)[name](), "mse")
    edges, waited_for = [], set[int]()

    def noted(reduction: Any) -> int:
        edges.append(early.update_early(reduction))
        waited_for.update(*(one.used for one in reduction.rounds))
        return edges[-1]

    monkeypatch.setattr(step, "update_early", noted)
    keen, x = name in KEEN, np.ones((8, 64), np.float32)
    for traced in (False, True):
        rows = model.plan().work.stages
        for row in rows:
            updates = [one for one in row if isinstance(one, Update)]
            assert len(updates) > 1 if keen else len(updates) == 1, (traced, rows)
        assert {w for row in rows for w in _updated(row)} == set(range(6))
        if not traced:
            model.train_on_batch(x, x)
    assert {n > 0 for n in edges} == {keen}
    # All but those at the end of a row, behind the last sum.
    late = {w for row in rows for w in _updated(row[_last_sum(row) :])}
    assert waited_for == set(range(6)) - late


def _updated(row: Any) -> list[int]:
    return [w for one in row if isinstance(one, Update) for w in one.weights]


def _last_sum(row: Any) -> int:
    return max(i for i, one in enumerate(row) if isinstance(one, Reduce))
