"""Blocks with all that recompute has to get right, trained with it and without."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import tensorflow as tf

from .case import CLASSES, FEED_FORWARD, TOKENS, VOCABULARY, Case, labels
from .harness import Run, train
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check


class Block(keras.layers.Layer):
    """Attention with masks and dropout, a feed-forward layer with statistics; one layer twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.supports_masking = True
        self.attention = keras.layers.MultiHeadAttention(
            2, 4, dropout=0.3, seed=3, name="attention"
        )
        self.norm = keras.layers.BatchNormalization(momentum=0.7, name="norm")
        self.up = keras.layers.Dense(16, "gelu", name="up")
        self.drop = keras.layers.Dropout(0.4, seed=4, name="drop")
        self.down = keras.layers.Dense(8, name="down")

    def call(self, x: Any, mask: Any = None, training: bool | None = None) -> Any:
        x = x + self.attention(x, x, query_mask=mask, key_mask=mask, training=training)
        for _ in range(2):
            h = self.up(self.norm(x, training=training))
            x = x + self.down(self.drop(h, training=training))
        return x


def blocks() -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, 8, mask_zero=True, name="vocabulary")(x)
    for i in range(2):
        x = Block(f"block_{i}")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="blocks")


def _data(seed: int, samples: int) -> Any:
    rng = np.random.default_rng(seed)
    return labels(rng, samples, TOKENS, classes=VOCABULARY), labels(rng, samples), None


BLOCKS = Case(
    name="blocks",
    build=blocks,
    data=_data,
    layout_map=FEED_FORWARD,
    has_batchnorm=True,
)


PLAN: dict[str, kdist.RecomputeConfig] = {
    "full": kdist.RecomputeConfig(layers=[r"block_\d"]),
    "selective": kdist.RecomputeConfig(policy="selective"),
    "budget": kdist.RecomputeConfig(layers=[r"block_\d"], policy="budget", budget_mb=0.085),
}
STAGED_PLAN = {
    **PLAN,
    "local": kdist.RecomputeConfig(layers=[r"block_\d"], mp_comm_recompute=False),
}
"""Inside stages, what communicates is found by lowering them."""


def copies(model: keras.Model) -> set[str]:
    """The nodes of a model's training step that run again."""
    parallel = attached(model)
    step = parallel.__dict__.get("mesh_step") or parallel.__dict__.get("plain_step")
    programs = step.runner.chunks._programs.values()
    return {name for one in programs for name in one.stitcher.originals.values()}


def saved(model: keras.Model) -> int:
    """Bytes that the stages of a pipeline keep from forward to backward, of a micro-batch.

    Of tensors whose rows are not known, those of one row.
    """
    parallel = attached(model)
    step = parallel.__dict__.get("mesh_step") or parallel.__dict__.get("plain_step")
    found = 0
    for functions in step.runner.programs._traced.values():
        for one in functions:
            specs = one.vjp.saved if one.wanted.differentiate else ()
            found += sum(
                math.prod(n or 1 for n in s.shape) * s.dtype.size
                for s in specs
                if s.dtype != tf.variant
            )
    return found


def planned(
    plan: str, devices: int, dtype: str = "float64", tight: bool = False
) -> kdist.RecomputeConfig:
    """The plan; a budget such that something runs again on so many devices.

    Where a backward pass comes in halves, or is one operation as with XLA, other budgets do that.
    """
    config = STAGED_PLAN[plan]
    if config.budget_mb is None:
        return config
    sizes = (
        (0.03, 0.02, 0.02)
        if dtype.startswith("mixed")
        else (config.budget_mb, 0.038 if tight else 0.047, 0.029 if tight else 0.022)
    )
    return dataclasses.replace(config, budget_mb=sizes[(devices > 2) + (devices > 4)])


def twins(trained: list[keras.Model], plan: str, **options: Any) -> None:
    """Trains twice over a mesh, once with recompute, and compares."""
    run = Run(**{"case": BLOCKS, "optimizer": OPTIMIZERS["adam"], **options})
    pipeline = run.config.get("pipeline")
    halves = pipeline is not None and pipeline.schedule == "zero_bubble"
    tight = halves or run.compile.get("jit_compile", False)
    recompute = planned(plan, math.prod(run.mesh_axes.values()), run.dtype, tight)
    again = dataclasses.replace(run, config={**run.config, "recompute": recompute})
    expected, actual = train(run, "kdist"), train(again, "kdist")
    check(expected, actual, TOLERANCES[run.dtype], title=f"{run.title} [{plan}]")
    if plan == "budget" and run.samples % run.batch_size:
        # With a budget there is a program for the first size, and one for the other.
        assert any(one.repeated for one in attached(trained[-1]).choices.values() if not one.why)
    elif "pipeline" in run.config:
        assert sum(map(saved, trained)) < 0.9 * 2 * saved(trained[0])
    else:
        assert copies(trained[-1])
