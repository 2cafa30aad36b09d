"""Levels that deal out some of the parameters that are alike, and cut the rest, equal one device.

Models as small as the zoo's travel in buckets, whose members are all cut; so here nothing is fused.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import kdist

import keras
import pytest

from .features import BY_NAME as FEATURES
from .harness import Run, compare, train
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT64, check
from .zoo import MLP

LAYERS = 7


def stack() -> keras.Model:
    x = inputs = keras.Input((12,), name="features")
    for n in range(LAYERS):
        x = keras.layers.Dense(12, activation="tanh", name=f"block{n}_{n % 2}")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(x), name="stack")


CASE = dataclasses.replace(
    MLP,
    name="stack",
    build=stack,
    layout_map={r".*_0/kernel": (None, "model"), r".*_1/kernel": ("model", None)},
)
MESHES: dict[str, dict[str, int]] = {
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}
LEVELS = (1, 2, 3)
COMPOSED = ("none", "global_clipnorm", "gradient_accumulation", "ema_overwrite", "constraint")


def config(level: int, mesh: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0, **options),
        "fusion": kdist.FusionConfig(mode="none"),
    }
    if "pipe" in mesh:
        found["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_some_are_dealt_out_and_some_are_cut(mesh: str, level: int) -> None:
    axes = MESHES[mesh]
    layouts = CASE.layout_map if "model" in axes else {}
    options = config(level, mesh)
    model = kdist.parallelize(
        stack(), kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=dict(layouts), **options)
    )
    model.compile("adam", "mse")
    plan = model.plan()
    kernels = Counter(d.how for d in plan.decisions if "block" in d.path and "kernel" in d.path)
    # From level 2 on, only among devices that read each other's memory.
    dealt = level == 1 or plan.topology.shares_memory
    assert kernels["slice"] and bool(kernels["parameter"]) == dealt
    spread_out = [d.path for d in plan.decisions if d.how != "whole"]
    for stage in range(axes.get("pipe", 1)):
        # As much state on each replica, whoever has what.
        state: Counter[int] = Counter()
        for unit in plan.units:
            placement = plan.weights[plan.trainable[unit.variable]]
            slices = plan.topology.group(stage)
            if unit.owner[0] in slices and placement.path in spread_out:
                state[unit.owner[0]] += unit.nbytes(placement)
        assert len(state) == len(plan.topology.group(stage))
        assert len(set(state.values())) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_each_device_has_as_much_state_of_each_optimizer(level: int) -> None:
    """Blocks are Adam's and SGD's in turn; SGD has no state."""
    rules = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    rules[r".*block\d_0/.*"] = keras.optimizers.Adam(0.01)
    model = kdist.parallelize(
        stack(), kdist.ParallelConfig(mesh=kdist.mesh(data=2), **config(level, "data2"))
    )
    model.compile(keras.optimizers.MultiOptimizer(rules), "mse")
    plan = model.plan()
    adams: Counter[int] = Counter()
    for unit in plan.units:
        placement = plan.weights[plan.trainable[unit.variable]]
        if "_0/kernel" in placement.path:
            adams[unit.owner[0]] += unit.nbytes(placement)
    assert adams[0] == adams[1] > 0


ROWS = product(COMPOSED, LEVELS, MESHES)


@pytest.mark.parametrize(
    ("feature", "level", "mesh"),
    spread(
        ROWS,
        [
            ("none", 2, "data4"),
            ("none", 3, "data2_model2"),
            ("none", 3, "pipe2_data2"),
            ("gradient_accumulation", 3, "data4"),
            ("global_clipnorm", 1, "data2_model2"),
        ],
    ),
)
def test_they_equal_one_device(feature: str, level: int, mesh: str, engine: str) -> None:
    compare(
        CASE,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adamw"],
        engine=engine,
        features=[FEATURES[feature]],
        config=config(level, mesh),
    )


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_sums_equal_one_device(mesh: str, level: int, engine: str) -> None:
    compare(
        CASE,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adamw"],
        engine=engine,
        features=[FEATURES["gradient_accumulation"]],
        config=config(level, mesh, gradient_accumulation_shard=True),
    )


@pytest.mark.long
@pytest.mark.parametrize("rest", ["fp16", kdist.PowerSGD(rank=2)], ids=["fp16", "low rank"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_compressed_as_what_is_cut(mesh: str, level: int, rest: Any) -> None:
    """Who owns a parameter changes nothing of how its gradient is rounded."""
    found = []
    for partition in ("slice", "auto"):
        run = Run(
            case=CASE,
            mesh_axes=MESHES[mesh],
            optimizer=OPTIMIZERS["adam"],
            config={
                **config(level, mesh, partition=partition),
                "compression": kdist.CompressionConfig(rest=rest),
            },
        )
        found.append(train(run, "kdist"))
    check(*found, FLOAT64, (), title=run.title)
