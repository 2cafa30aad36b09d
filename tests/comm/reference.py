"""What each collective must give, by numpy, and values to try them on."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
REDUCE = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


def values(p: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[np.ndarray]:
    """One array per rank; near 1, so that products stay in range; integers from 1 to 3."""
    random = np.random.default_rng(seed)
    kind = tf.as_dtype(dtype)
    if kind.is_integer:
        return [random.integers(1, 4, shape).astype(kind.as_numpy_dtype) for _ in range(p)]
    return [random.uniform(0.5, 1.5, shape).astype(kind.as_numpy_dtype) for _ in range(p)]


def combined(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """A reduction in float64, or in the integers of the arrays."""
    if arrays[0].dtype.kind in "iu":
        return REDUCE[name](np.stack(arrays), axis=0).astype(arrays[0].dtype)
    return REDUCE[name](np.stack([a.astype(np.float64) for a in arrays]), axis=0)


def neutral(name: str, like: np.ndarray) -> np.ndarray:
    """What an exclusive scan gives rank 0."""
    if like.dtype.kind in "iu":
        limits = np.iinfo(like.dtype)
        low, high = limits.min, limits.max
    else:
        low, high = -np.inf, np.inf
    one = {"sum": 0, "product": 1, "max": low, "min": high}[name]
    return np.full(like.shape, one, like.dtype)


def cut(array: np.ndarray, sizes: list[int], dim: int) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


def balanced(length: int, p: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(length), p)]


def expected(operation: str, given: list[np.ndarray], **options: Any) -> list[Any]:
    """The result of each rank, None where there is none."""
    p, root, dim = len(given), options.get("root", 0), options.get("dim", 0)
    name, sizes = options.get("reduction", "sum"), options.get("sizes")
    if operation == "broadcast":
        return [given[root]] * p
    if operation in ("reduce", "all_reduce"):
        total = combined(name, given)
        return [total if operation == "all_reduce" or r == root else None for r in range(p)]
    if operation in ("gather", "all_gather"):
        joined = np.concatenate(given, dim)
        return [joined if operation == "all_gather" or r == root else None for r in range(p)]
    if operation == "scatter":
        return cut(given[root], sizes or balanced(given[root].shape[dim], p), dim)
    if operation == "reduce_scatter":
        return cut(combined(name, given), sizes or balanced(given[0].shape[dim], p), dim)
    if operation == "scan":
        if not options.get("exclusive"):
            return [combined(name, given[: r + 1]) for r in range(p)]
        return [combined(name, given[:r]) if r else neutral(name, given[0]) for r in range(p)]
    cut_dim, join_dim = options.get("cut_dim", 0), options.get("join_dim", 0)
    parts = [
        cut(a, list(sizes[s]) if sizes else balanced(a.shape[cut_dim], p), cut_dim)
        for s, a in enumerate(given)
    ]
    return [np.concatenate([parts[s][d] for s in range(p)], join_dim) for d in range(p)]


def assert_equal(want: list[Any], got: list[Any], terms: int = 1) -> None:
    """Equal: integers exactly, floats within a rounding error per combined term."""
    assert [w is None for w in want] == [g is None for g in got]
    for w, g in zip(want, got):
        if w is None:
            continue
        found = np.asarray(g)
        assert found.shape == w.shape, (found.shape, w.shape)
        if found.dtype.kind in "iu":
            np.testing.assert_array_equal(found, w)
        else:
            eps = EPSILON[found.dtype.name]
            np.testing.assert_allclose(
                found.astype(np.float64), w.astype(np.float64), rtol=terms * eps, atol=0
            )
