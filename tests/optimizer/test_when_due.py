"""With gradient accumulation, what travels does so in steps that update, on the shortest way."""

from __future__ import annotations

import re
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.graphs.executed import ExecutedTransfer

import keras
import numpy as np
import pytest

WIDTH, ROWS = 32, 24
CUTS = {"up_[02]/kernel": (None, "model"), "up_[13]/kernel": ("model", None)}
SMALL = 16
"""Bytes of a flag, a count or a learning rate at most."""


def _model(mesh: dict[str, int], optimizer: keras.optimizers.Optimizer, **spread: Any) -> Any:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for n in range(4):
        x = keras.layers.Dense(WIDTH, "tanh", name=f"up_{n}")(x)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**mesh),
        layout_map=CUTS if "model" in mesh else {},
        optimizer=kdist.OptimizerConfig(**{"threshold_kb": 1, **spread}),
    )
    model = kdist.parallelize(keras.Model(inputs, x), config)
    model.compile(optimizer, "mse")
    return model


def _adam(**settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2, **settings)


def _sent(model: keras.Model) -> tuple[list[ExecutedTransfer], list[ExecutedTransfer]]:
    """What one step sends in branches, and outside of them."""
    rows = np.ones((ROWS, WIDTH), np.float32)
    attached(model).prepare("train", (rows, rows, None))
    step = executed.largest(executed.watch(lambda: model.train_on_batch(rows, rows)))
    sent = [one for one in step.transfers if not one.control and one.nbytes != 0]
    inside = [one for one in sent if re.search(r"(^|/)cond", one.tensor)]
    return inside, [one for one in sent if one not in inside]


def _bytes(sent: list[ExecutedTransfer]) -> int:
    """Of all but flags and counts."""
    return sum(n for one in sent if (n := one.nbytes or 0) > SMALL)


@pytest.mark.parametrize(
    ("mesh", "level"),
    [({"data": 4}, 1), ({"data": 4}, 3), ({"data": 3}, 2), ({"data": 2, "model": 2}, 2)],
)
def test_sums_and_values_travel_once_an_update_and_no_further(
    mesh: dict[str, int], level: int
) -> None:
    model = _model(mesh, _adam(), level=level)
    inside, _ = _sent(model)
    planned = {one.what: one.nbytes for one in model.plan().traffic()}
    planned.pop("gather", None)
    assert _bytes(inside) == sum(planned.values())


@pytest.mark.parametrize(
    "spread",
    [{"level": 0}, {"level": 1, "gradient_accumulation_shard": True}, {"state_on": "host"}],
    ids=["level 0", "shard", "host"],
)
def test_where_each_step_reduces_values_travel_once_an_update(spread: dict[str, Any]) -> None:
    model = _model({"data": 4}, _adam(), **spread)
    inside, _ = _sent(model)
    planned = {one.what: one.nbytes for one in model.plan().traffic()}
    assert _bytes(inside) == planned["broadcast"] + planned.get("join", 0)


class Doubled(keras.optimizers.SGD):
    """Of which nobody knows what it writes when."""


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: _adam(use_ema=True, ema_overwrite_frequency=3),
        lambda: Doubled(gradient_accumulation_steps=2),
    ],
    ids=["averages", "own class"],
)
def test_what_may_change_in_any_step_travels_in_each(optimizer: Any) -> None:
    model = _model({"data": 4}, optimizer(), level=0)
    inside, outside = _sent(model)
    planned = {one.what: one for one in model.plan().traffic()}
    values = [one for one in outside if one.op in ("ReadVariableOp", "ConcatV2", "Identity")]
    assert _bytes(inside) == 0 and len(values) >= planned["broadcast"].messages


def test_constrained_weights_are_the_same_on_all_devices_after_each_step() -> None:
    keras.utils.set_random_seed(0)
    bound = keras.constraints.MaxNorm(0.5)
    layer = keras.layers.Dense(WIDTH, kernel_constraint=bound, name="bound")
    model = keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile(_adam(), "mse")
    model.train_on_batch(np.ones((4, WIDTH)), np.ones((4, 1)))
    entry = attached(model).entries[id(layer.kernel)]
    first, second = (np.asarray(one.value) for one in entry.locals.values())
    np.testing.assert_array_equal(first, second)
    assert np.linalg.norm(first, axis=0).max() < 0.5001
