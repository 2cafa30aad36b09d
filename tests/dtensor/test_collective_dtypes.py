"""Collectives of dtypes that DTensor casts: what travels, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.sharded import Sharded
from kdist.dtensor.stitching import Stitcher
from kdist.graphs import executed

import numpy as np
import pytest
import tensorflow as tf

from .dtensor_parts import cut, inner_mesh, laid_out, lowered_program, run, whole

RNG = np.random.default_rng(0)
DTYPES = ["bfloat16", "float16", "uint8", "int32", "bool"]


def values(dtype: str, *shape: int) -> np.ndarray:
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    if dtype in ("uint8", "int32"):
        return RNG.integers(0, 250, shape).astype(dtype)
    return tf.cast(RNG.normal(size=shape), dtype).numpy()


def added_up(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What four devices add up: each rounds its product, and their sum is rounded once."""
    parts = zip(np.split(x, 4, 1), np.split(w, 4, 0), strict=True)
    products = [tf.matmul(*map(tf.constant, pair)) for pair in parts]
    wide = tf.add_n([tf.cast(one, tf.float32) for one in products])
    return tf.cast(wide, products[0].dtype).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_gathers(dtype: str, dim: int) -> None:
    """Parts travel, and no sums of padded tensors."""
    mesh, _ = inner_mesh(a=4)
    x = values(dtype, 8, 8)
    function = lambda t: laid_out(t, mesh, None, None)  # noqa: E731
    found, program = run(mesh, function, cut(x, mesh, *("a" if d == dim else None for d in (0, 1))))
    np.testing.assert_array_equal(whole(found), x)
    (one,) = Stitcher(program).recorded
    assert (one.kind, one.dtype, one.bytes) == ("all-gather", dtype, x.nbytes)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("dtype", "sent"), [("bfloat16", "bfloat16"), ("int32", "int64")])
def test_sums(dtype: str, sent: str, scattered: bool) -> None:
    mesh, _ = inner_mesh(a=4)
    x, w = (values(dtype, 8, 8) for _ in range(2))
    given = [cut(x, mesh, None, "a"), cut(w, mesh, "a", None)]
    dims = ("a" if scattered else None, None)
    function = lambda x, w: laid_out(x @ w, mesh, *dims)  # noqa: E731
    found, program = run(mesh, function, *given)
    expected = added_up(x, w) if dtype == "bfloat16" else tf.matmul(x, w).numpy()
    np.testing.assert_array_equal(whole(found), expected)
    (one,) = Stitcher(program).recorded
    kind, nbytes = "reduce-scatter" if scattered else "all-reduce", x.size * tf.as_dtype(sent).size
    assert (one.kind, one.dtype, one.bytes) == (kind, sent, nbytes)


@pytest.mark.parametrize(
    ("function", "dtypes"),
    [
        (lambda x, w: tf.cast(x @ w, tf.float32) * 2.0, ["bfloat16"]),
        (lambda x, w: tf.cast(x, tf.float32) @ tf.cast(w, tf.float32), ["float32"]),
        (lambda x, w: tf.reduce_max(x, 1), ["bfloat16"]),
        (lambda x, w: [x @ w, tf.transpose(x @ w)], ["bfloat16"]),
        (lambda x, w: (x @ w) + tf.cast(w[0, 0], tf.bfloat16), ["bfloat16"]),
    ],
)
def test_in_programs(function: Callable, dtypes: list[str]) -> None:
    mesh, _ = inner_mesh(a=4)
    x, w = (values("bfloat16", 8, 8) for _ in range(2))
    given = [cut(x, mesh, None, "a"), cut(w, mesh, "a", None)]
    found, program = run(mesh, function, *given)
    expected = function(tf.constant(x), tf.constant(w))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        mine, theirs = (np.asarray(v, np.float32) for v in (whole(one), other))
        np.testing.assert_allclose(mine, theirs, rtol=2**-6, atol=2**-5)
    assert {one.dtype for one in Stitcher(program).recorded} == set(dtypes)


def test_bfloat16_is_added_in_float32() -> None:
    mesh, _ = inner_mesh(a=4)
    x, w = (values("bfloat16", 8, 8) for _ in range(2))
    given: list[Sharded] = [cut(x, mesh, None, "a"), cut(w, mesh, "a", None)]
    program = lowered_program(mesh, lambda x, w: x @ w, *given)
    stitched = Stitcher(program).stitch([f"/device:CPU:{k}" for k in range(4)])

    @tf.function(autograph=False)
    def step() -> Any:
        return stitched([[t.parts[k] for t in given] for k in range(4)])[1]

    (function,) = [f for f in executed.watch(step) if f.select("AddN")]
    assert sum(function.count("Cast").values()) == 5  # of four terms, and of the sum
