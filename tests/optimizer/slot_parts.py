"""Optimizers with slots, for the tests of formatted slots."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.config.state_format import StateFormatConfig

import keras
import numpy as np

BOTH = StateFormatConfig(first="1-6-9", second="0-6-10")
DRAWN = dataclasses.replace(BOTH, rounding="stochastic")
SHAPES = {"kernel": (6, 5), "bias": (5,)}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Muon": {"exclude_layers": ["bias"]},
}


def variables(dtype: str = "float64") -> list[keras.Variable]:
    """A kernel and a bias, the same on every call."""
    rng = np.random.default_rng(3)
    return [keras.Variable(rng.normal(size=s), dtype=dtype, name=n) for n, s in SHAPES.items()]


def make(name: str, dtype: str = "float64", **options: Any) -> tuple[Any, list[keras.Variable]]:
    """A built optimizer and its variables."""
    mine = variables(dtype)
    optimizer = getattr(keras.optimizers, name)(
        learning_rate=0.01, **OPTIONS.get(name, {}) | options
    )
    optimizer.build(mine)
    return optimizer, mine
