"""What a model of the zoo is, and what the models have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

Layout = tuple[str | None, ...]
Data = tuple[Any, Any, Any]

TOKENS = 6
VOCABULARY = 16
WIDTH = 8
CLASSES = 4


def sparse_loss(reduction: str) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def accuracy() -> list[keras.metrics.Metric]:
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model of the zoo and everything needed to train it.

    Attributes:
        name: Unique name, used as test id.
        build: Makes a fresh, uncompiled model. Seed Keras first to make it deterministic.
        data: `data(seed, samples)` gives `(x, y, sample_weight)` as NumPy arrays or dicts of them.
        layout_map: Pattern of a variable path -> mesh axis (or None) of each of its dims.
        loss: `loss(reduction)` gives fresh losses in the structure that `compile` expects; by
            default that of one output of logits, with integer labels.
        metrics: Gives fresh metrics in the structure that `compile` expects.
        loss_weights: As `compile` expects.
        has_batchnorm: Training depends on how the batch is split.
        zero_gradient_paths: Patterns of variables whose true gradient is zero, so that only
            rounding moves them (the key bias: softmax ignores what all keys have in common).
        tags: What features may rely on: `labels` (one output with integer labels of shape
            `(n,)`), `masked`, `embedding`, `dict`, `dense` (a Dense layer of rank-2 input),
            `norm` (BatchNormalization), `binary` (one output, labels 0 and 1, logits).
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[int, int], Data]
    layout_map: Mapping[str, Layout]
    loss: Callable[[str], Any] = sparse_loss
    metrics: Callable[[], Any] = accuracy
    loss_weights: Any = None
    has_batchnorm: bool = False
    zero_gradient_paths: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()


def labels(rng: np.random.Generator, *shape: int, classes: int = CLASSES) -> np.ndarray:
    return rng.integers(0, classes, shape).astype("int32")


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    # Far from 1 and far from each other: an average that forgets them is visibly wrong.
    return rng.uniform(0.1, 3.0, shape)


def tags(*names: str) -> frozenset[str]:
    return frozenset(names)


FEED_FORWARD: Mapping[str, Layout] = {
    ".*up.*/kernel": (None, "model"),
    ".*up.*/bias": ("model",),
    ".*down.*/kernel": ("model", None),
}
