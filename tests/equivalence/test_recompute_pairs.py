"""Recompute with what else changes a program: every pair of that, a policy and a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import kdist

import keras
import numpy as np
import pytest

from .case import CLASSES, TOKENS, VOCABULARY
from .features import BY_NAME as FEATURES
from .matrix import spread
from .recompute_parts import BLOCKS, PLAN, Block, twins


class Subclassed(keras.Model):
    """The same layers, with a call of its own."""

    def __init__(self) -> None:
        super().__init__(name="blocks")
        self.vocabulary = keras.layers.Embedding(VOCABULARY, 8, mask_zero=True, name="vocabulary")
        self.stack = [Block(f"block_{i}") for i in range(2)]
        self.pool = keras.layers.GlobalAveragePooling1D(name="pool")
        self.head = keras.layers.Dense(CLASSES, name="head")

    def call(self, tokens: Any, training: bool | None = None) -> Any:
        x = self.vocabulary(tokens)
        mask = self.vocabulary.compute_mask(tokens)
        for block in self.stack:
            x = block(x, mask=mask, training=training)
        return self.head(self.pool(x, mask=mask))


def _subclassed() -> keras.Model:
    model = Subclassed()
    model(np.zeros((2, TOKENS), "int32"))
    return model


def _shared() -> keras.Model:
    """Of two blocks the first is called a second time behind the other."""
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, 8, mask_zero=True, name="vocabulary")(x)
    first, second = (Block(f"block_{i}") for i in range(2))
    x = keras.layers.GlobalAveragePooling1D(name="pool")(first(second(first(x))))
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="blocks")


def config(**options: Any) -> dict[str, Any]:
    """Options of a run."""
    return {"config": options}


RANK = kdist.CompressionConfig(patterns={".*(up|down)/kernel": kdist.PowerSGD(rank=2)})
CONDITIONS: dict[str, dict[str, Any]] = {
    "ragged": {"samples": 11},
    "compressed": config(compression=RANK),
    "global": config(batch_semantics="global"),
    "jit": {"compile": {"jit_compile": True}},
    "mixed": {"dtype": "mixed_bfloat16"},
    "subclassed": {"case": dataclasses.replace(BLOCKS, build=_subclassed)},
    "shared": {"case": dataclasses.replace(BLOCKS, build=_shared)},
    "several": {"samples": 27, "features": [FEATURES["three_steps_per_execution"]]},
}
MESHES: dict[str, dict[str, int]] = {
    "data2": {"data": 2},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
}
ROWS = [
    (condition, [*PLAN][(i + j) % 3], mesh)
    for i, condition in enumerate(CONDITIONS)
    for j, mesh in enumerate(MESHES)
    # A subclassed model has no graph to cut into stages.
    if (condition, mesh) != ("subclassed", "pipe2_data2")
]
ROWS += [("ragged", "budget", "data2"), ("several", "budget", "data2")]
DEFAULT = [("ragged", "budget", "data2"), ("subclassed", "budget", "data2")]


@pytest.mark.parametrize(("condition", "plan", "mesh"), spread(ROWS, DEFAULT, quick=0))
def test_equals_no_recompute(
    condition: str, plan: str, mesh: str, trained: list[keras.Model]
) -> None:
    options = dict(CONDITIONS[condition])
    if "pipe" in MESHES[mesh]:
        # Layers over the whole batch are refused where a stage sees a part of it.
        pipeline = kdist.PipelineConfig(micro_batches=1 if condition == "global" else 2)
        options["config"] = {**options.get("config", {}), "pipeline": pipeline}
    twins(trained, plan, mesh_axes=MESHES[mesh], **options)
