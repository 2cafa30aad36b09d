"""Random functions of a batch, for any number of rows, from a broad pool of operations.

A function is a list of steps; a step is an operation and a number from which it takes its axes. A
dim's size is c * n ** p for n rows, so that the same steps are taken whatever n is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

Dim = tuple[int, int]
Step = tuple[str, int]
MATRIX = np.random.default_rng(1).normal(size=(64, 3))
TABLE = np.random.default_rng(2).normal(size=(2048, 2))
LARGEST = 5_000
"""Elements for three rows; steps that would make more are left out."""


@dataclasses.dataclass
class State:
    """A tensor on its way through the steps."""

    tensor: Any
    dims: list[Dim]
    rows: int
    earlier: list[tuple[Any, list[Dim]]]

    def size(self, dim: Dim) -> int:
        return dim[0] * self.rows ** dim[1]

    def axis(self, number: int) -> int:
        return number % len(self.dims)

    def set(self, tensor: Any, dims: Sequence[Dim]) -> None:
        self.earlier.append((self.tensor, self.dims))
        self.tensor, self.dims = tensor, list(dims)

    def reshape(self, dims: Sequence[Dim]) -> None:
        self.set(ops.reshape(self.tensor, [self.size(d) for d in dims]), dims)


def transpose(s: State, k: int) -> None:
    orders = list(itertools.permutations(range(len(s.dims))))
    order = orders[k % len(orders)]
    s.set(ops.transpose(s.tensor, order), [s.dims[a] for a in order])


def merge(s: State, k: int) -> None:
    if len(s.dims) > 1:
        a = k % (len(s.dims) - 1)
        joint = (s.dims[a][0] * s.dims[a + 1][0], s.dims[a][1] + s.dims[a + 1][1])
        s.reshape([*s.dims[:a], joint, *s.dims[a + 2 :]])


def divide(s: State, k: int) -> None:
    a = s.axis(k)
    c, p = s.dims[a]
    ways = [
        ((d, q), (c // d, p - q))
        for d in range(1, c + 1)
        for q in range(p + 1)
        if c % d == 0 and (d, q) not in ((1, 0), (c, p))
    ]
    if ways and len(s.dims) < 5:
        s.reshape([*s.dims[:a], *ways[k // 7 % len(ways)], *s.dims[a + 1 :]])


def same(function: Callable[[Any, int], Any]) -> Callable[[State, int], None]:
    """A step that keeps all sizes."""

    def step(s: State, k: int) -> None:
        s.set(function(s.tensor, s.axis(k)), s.dims)

    return step


def reduced(function: Callable, keep: bool) -> Callable[[State, int], None]:
    """A step that reduces a dim, to size 1 or away."""

    def step(s: State, k: int) -> None:
        a = s.axis(k)
        if keep:
            after: list[Dim] = [*s.dims[:a], (1, 0), *s.dims[a + 1 :]]
        else:
            after = [*s.dims[:a], *s.dims[a + 1 :]]
        s.set(function(s.tensor, a, keep), after)

    return step


def bounded(x: Any) -> Any:
    return ops.tanh(x)


def softmax(x: Any, a: int) -> Any:
    e = ops.exp(bounded(x))
    return e / ops.sum(e, a, keepdims=True)


def cut(s: State, k: int) -> None:
    a = s.axis(k)
    c, p = s.dims[a]
    if c % 2 == 0:
        half = ops.split(s.tensor, 2, axis=a)[k // 7 % 2]
        s.set(half, [*s.dims[:a], (c // 2, p), *s.dims[a + 1 :]])


def doubled(function: Callable) -> Callable[[State, int], None]:
    """A step that doubles a dim."""

    def step(s: State, k: int) -> None:
        a = s.axis(k)
        c, p = s.dims[a]
        s.set(function(s.tensor, a), [*s.dims[:a], (2 * c, p), *s.dims[a + 1 :]])

    return step


def tiled(x: Any, a: int) -> Any:
    return ops.tile(x, [2 if i == a else 1 for i in range(len(x.shape))])


def take(s: State, k: int) -> None:
    a = s.axis(k)
    if s.dims[a][1] == 0:
        chosen = [(k // 7) % s.dims[a][0], 0]
        s.set(ops.take(s.tensor, chosen, axis=a), [*s.dims[:a], (2, 0), *s.dims[a + 1 :]])


def first(s: State, k: int) -> None:
    a = s.axis(k)
    s.set(ops.take(s.tensor, 0, axis=a), [*s.dims[:a], *s.dims[a + 1 :]])


def weights(s: State, k: int) -> None:
    if s.dims and s.dims[-1][1] == 0 and 0 < s.dims[-1][0] <= len(MATRIX) and len(s.dims) > 1:
        s.set(ops.matmul(s.tensor, MATRIX[: s.dims[-1][0]]), [*s.dims[:-1], (3, 0)])


def pairs(s: State, k: int) -> None:
    a = s.axis(k)
    if s.dims[a][1] > 1 or len(s.dims) < 2:
        return
    order = [a, *(i for i in range(len(s.dims)) if i != a)]
    flat = ops.reshape(ops.transpose(s.tensor, order), (s.size(s.dims[a]), -1))
    s.set(bounded(ops.matmul(flat, ops.transpose(flat))), [s.dims[a], s.dims[a]])


def within(s: State, k: int) -> None:
    """An einsum of a tensor with itself over one dim, all other dims kept apart."""
    names = "abcdef"[: len(s.dims)]
    a = s.axis(k)
    result = names.replace(names[a], "")
    s.set(
        bounded(ops.einsum(f"{names},{names}->{result}", s.tensor, bounded(s.tensor))),
        [*s.dims[:a], *s.dims[a + 1 :]],
    )


def with_earlier(s: State, k: int) -> None:
    fitting = [
        t
        for t, dims in s.earlier
        if len(dims) <= len(s.dims)
        and all(d in ((1, 0), e) for d, e in zip(reversed(dims), reversed(s.dims)))
    ]
    if fitting:
        other = fitting[k % len(fitting)]
        made = [s.tensor + other, s.tensor * other, ops.where(other > 0.1, s.tensor, other)]
        s.set(made[k // 7 % 3], s.dims)


def positions(x: Any, a: int) -> Any:
    shape = [-1 if i == a else 1 for i in range(len(x.shape))]
    return x + ops.reshape(ops.cast(ops.arange(x.shape[a]), "float64"), shape)


def by_rows(s: State, k: int) -> None:
    s.set(s.tensor / s.rows if k % 2 else s.tensor * s.rows, s.dims)


def look_up(s: State, k: int) -> None:
    if s.dims and len(s.dims) < 4:
        a = s.axis(k)
        best = ops.argmax(s.tensor, axis=a)
        s.set(ops.take(TABLE, best % 7, axis=0), [*s.dims[:a], *s.dims[a + 1 :], (2, 0)])


def looped(x: Any, a: int) -> Any:
    return ops.fori_loop(0, 3, lambda i, t: bounded(t + ops.flip(x, a)), x)


def scanned(s: State, k: int) -> None:
    if len(s.dims) > 1 and s.dims[0][1] == 0:
        start = ops.zeros_like(s.tensor[0])
        _, after = ops.scan(lambda c, t: (bounded(c + t), c * t), start, s.tensor)
        s.set(after, s.dims)


STEPS: dict[str, Callable[[State, int], None]] = {
    "tanh": same(lambda x, a: bounded(x)),
    "square": same(lambda x, a: bounded(x) * x),
    "transpose": transpose,
    "merge": merge,
    "divide": divide,
    "mean": reduced(lambda x, a, keep: ops.mean(x, a, keepdims=keep), True),
    "mean away": reduced(lambda x, a, keep: ops.mean(x, a, keepdims=keep), False),
    "sum": reduced(lambda x, a, keep: ops.sum(x, a, keepdims=keep), True),
    "sum away": reduced(lambda x, a, keep: ops.sum(x, a, keepdims=keep), False),
    "max": reduced(lambda x, a, keep: ops.max(x, a, keepdims=keep), True),
    "centre": same(lambda x, a: x - ops.mean(x, a, keepdims=True)),
    "softmax": same(softmax),
    "own softmax": same(lambda x, a: ops.softmax(x, axis=a)),
    "cumsum": same(lambda x, a: bounded(ops.cumsum(x, axis=a))),
    "roll": same(lambda x, a: ops.roll(x, 1, axis=a)),
    "flip": same(lambda x, a: ops.flip(x, a)),
    "sort": same(lambda x, a: ops.sort(x, axis=a)),
    "by order": same(lambda x, a: ops.take_along_axis(x, ops.argsort(x, axis=a), axis=a)),
    "concat": doubled(lambda x, a: ops.concatenate([x, bounded(x)], axis=a)),
    "tile": doubled(tiled),
    "repeat": doubled(lambda x, a: ops.repeat(x, 2, axis=a)),
    "cut": cut,
    "take": take,
    "first": first,
    "weights": weights,
    "pairs": pairs,
    "within": within,
    "earlier": with_earlier,
    "positions": same(positions),
    "rows": by_rows,
    "where": same(lambda x, a: ops.where(x > ops.mean(x, a, keepdims=True), x, -x)),
    "look up": look_up,
    "loop": same(looped),
    "scan": scanned,
    "inverse": same(lambda x, a: x / ops.shape(x)[a]),
}
START: list[Dim] = [(1, 1), (2, 0), (3, 0)]


def function_of(steps: Sequence[Step], made: list[Dim] | None = None) -> Callable[[Any], Any]:
    """The function that takes the steps one after the other.

    Args:
        steps: The steps.
        made: Filled with the dims of the output when the function is called.
    """

    def function(x: Any) -> Any:
        s = State(x, START, x.shape[0], [])
        for name, number in steps:
            if not s.dims:
                break
            if np.prod([c * 3**p for c, p in s.dims]) * 6 < LARGEST:
                STEPS[name](s, number)
        if made is not None:
            made[:] = s.dims
        return s.tensor

    return function


def value(steps: Sequence[Step], x: np.ndarray) -> np.ndarray:
    """What the function gives for a batch."""
    return np.asarray(function_of(steps)(tf.constant(x)))
