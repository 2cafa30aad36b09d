"""Models that compute over the whole batch: what is refused, when, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import pytest

from .parity import data

BATCHNORM = "BatchNormalization(synchronized=False)"
GLOBAL = "batch_semantics='replica'"


def synchronized() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="up"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3, name="down"),
        ]
    )


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="down")])


MODELS: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "synchronized": (synchronized, {}, BATCHNORM),
    "global": (plain, {"batch_semantics": "global"}, GLOBAL),
}
of_both = pytest.mark.parametrize("which", MODELS)


def parallel(which: str, axes: dict[str, int] | None = None, **options: Any) -> keras.Model:
    build, semantics, _ = MODELS[which]
    config = kdist.ParallelConfig(mesh=kdist.mesh(**(axes or {"data": 4})), **semantics, **options)
    return kdist.parallelize(build(), config)


def refusal(which: str, received: str) -> str:
    instead = MODELS[which][2].replace("(", r"\(").replace(")", r"\)")
    return f"computes over the whole batch.*Use {instead}, or .*Received: {received}"


@of_both
@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"optimizer": kdist.OptimizerConfig(level=1)}, "optimizer="),
        ({"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}, "optimizer="),
        ({"fusion": kdist.FusionConfig(mode="size", size_mb=1)}, "fusion="),
        ({"fusion": kdist.FusionConfig(overlap=True)}, "fusion="),
        ({"compression": kdist.CompressionConfig(rest="bf16")}, "compression="),
    ],
)
def test_what_replicas_share_or_exchange_is_refused(which, options, received):
    with pytest.raises(ValueError, match=refusal(which, received)):
        parallel(which, **options)


@of_both
@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "data": 2}])
def test_stages_are_refused(which, axes):
    with pytest.raises(ValueError, match=refusal(which, "pipeline=")):
        parallel(which, axes, pipeline=kdist.PipelineConfig(micro_batches=2))


@of_both
def test_a_sharded_optimizer_is_refused_by_compile(which):
    model = parallel(which)
    optimizer = kdist.ShardedOptimizer(keras.optimizers.Adam(), level=1)
    with pytest.raises(ValueError, match=refusal(which, "optimizer=")):
        model.compile(optimizer, "mse")


@of_both
def test_fusion_ids_are_refused(which):
    model = parallel(which)
    kdist.set_comm_fusion(model.get_layer("down"), 1)
    with pytest.raises(ValueError, match=refusal(which, "weights with fusion ids")):
        model.compile("sgd", "mse")


@of_both
def test_comm_fusion_has_nothing_to_log_or_tune(which):
    model = parallel(which)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="what replicas exchange.*Received: model="):
        model.fit(*data(8), verbose=0, callbacks=[kdist.callbacks.CommFusion()])


@of_both
def test_xla_is_refused(which):
    model = parallel(which)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True.*computes over the whole batch"):
        model.fit(*data(8), verbose=0)


@of_both
def test_the_plan_says_it(which):
    assert "computes over the whole batch" in str(parallel(which).plan())


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 2}])
def test_one_replica_is_the_whole_batch_already(axes):
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=kdist.OptimizerConfig(level=1))
    model = kdist.parallelize(synchronized(), config)
    assert "whole batch" not in str(model.plan())
