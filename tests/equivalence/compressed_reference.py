"""One plain device that compresses its replicas' gradients in numpy, by the book.

It knows nothing of exchanges, buckets or devices: a step is the gradients of the parts of the
batch, what each compressor makes of their sum, and a Keras optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.config.compression import Compressor, PowerSGD, matrix_shape
from kdist.optimizer import compressors

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class LowRank:
    """PowerSGD of one matrix (Vogels et al. 2019, algorithm 1, with sums for means)."""

    name: str
    shape: tuple[int, ...]
    options: PowerSGD
    errors: list[np.ndarray] | None = None
    q: np.ndarray | None = None
    steps: int = 0

    def __call__(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        matrices = [g.reshape(matrix_shape(self.shape)) for g in gradients]
        if self.errors is not None and self.options.error_feedback:
            matrices = [m + e for m, e in zip(matrices, self.errors)]
        if self.q is None or not self.options.warm_start:
            step = 0 if self.options.warm_start else self.steps
            self.q = compressors.initial_q(
                self.name, self.shape, self.options, tf.float64, step
            ).numpy()
        p, _ = np.linalg.qr(sum(m @ self.q for m in matrices))
        own = [m.T @ p for m in matrices]
        self.errors = [m - p @ q.T for m, q in zip(matrices, own)]
        self.q = sum(own)
        self.steps += 1
        return (p @ self.q.T).reshape(self.shape)


def rounded(x: np.ndarray, kind: str, scale: float) -> np.ndarray:
    """There and back through 16 bits; from float64 by way of float32, as TensorFlow casts."""
    if kind == "bf16":
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    return (x * scale).astype(np.float32).astype(np.float16).astype(np.float64) / scale


def scale_of(groups: Sequence[np.ndarray], replicas: int) -> float:
    """The largest power of two with replicas * max * scale <= 2^15, as far as exponents tell."""
    largest = max(np.abs(g).max() for g in groups)
    return 2.0 ** (15 - np.ceil(np.log2(replicas)) - np.floor(np.log2(largest)) - 1)


Part = tuple[slice, ...]


@dataclasses.dataclass(kw_only=True)
class Reference:
    """Trains on one device.

    Attributes:
        model: A plain model.
        optimizer: Its optimizer.
        replicas: Parts of a batch.
        rule: Name of a variable, such as "up/kernel" -> its compressor.
        twice: Whether sums travel in 16 bits, too: every slice updates its own copy.
        one_scale: Whether all gradients in float16 have one scale, or each its own.
        accumulate: Steps whose gradients each replica adds up before anything travels.
        parts: Name of a variable -> parts that travel by themselves.
    """

    model: keras.Model
    optimizer: Any
    replicas: int
    rule: Callable[[str], Compressor]
    twice: bool
    one_scale: bool = False
    accumulate: int = 1
    parts: Mapping[str, Sequence[Part]] = dataclasses.field(default_factory=dict)
    kept: list[list[list[np.ndarray]]] = dataclasses.field(default_factory=list)
    states: dict[str, LowRank] = dataclasses.field(default_factory=dict)

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        """One batch; rows of all replicas are equally many."""
        self.kept.append([self._gradients(a, b) for a, b in zip(self._split(x), self._split(y))])
        if len(self.kept) < self.accumulate:
            return
        found = [[sum(gs) / self.accumulate for gs in zip(*replica)] for replica in zip(*self.kept)]
        self.kept.clear()
        variables = self.model.trainable_variables
        sums = [np.zeros(v.shape) for v in variables]
        for v, total in enumerate(sums):
            for index in self._parts(v):
                start = [i.start or 0 for i in index]
                total[index] = self._sum(v, start, [g[v][index] for g in found], found)
        self.optimizer.apply([tf.constant(s) for s in sums], variables)

    def _split(self, data: np.ndarray) -> list[np.ndarray]:
        return np.split(data, self.replicas)

    def _gradients(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y)) / self.replicas
        return [g.numpy() for g in tape.gradient(loss, self.model.trainable_variables)]

    def _name(self, v: int) -> str:
        return "/".join(self.model.trainable_variables[v].path.split("/")[-2:])

    def _parts(self, v: int) -> Sequence[Part]:
        rank = len(self.model.trainable_variables[v].shape)
        return self.parts.get(self._name(v), [(slice(None),) * rank])

    def _sum(self, v: int, start: list[int], gradients: list[np.ndarray], found: Any) -> np.ndarray:
        how = self.rule(self._name(v))
        if how == "none":
            return sum(gradients)
        if isinstance(how, PowerSGD):
            name = f"{v} {start}"
            return self.states.setdefault(name, LowRank(name, gradients[0].shape, how))(gradients)
        among = gradients
        if self.one_scale:
            names = [self._name(i) for i in range(len(found[0]))]
            among = [g[i] for g in found for i, n in enumerate(names) if self.rule(n) == how]
        scale = scale_of(among, self.replicas)
        total = sum(rounded(g, how, scale) for g in gradients)
        return rounded(total, how, scale) if self.twice else total
