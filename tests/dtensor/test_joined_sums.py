"""Sums that are added: one collective of the sum of what they add up, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, laid_out, lowered_program, run, whole

RNG = np.random.default_rng(0)
X, W, V = (RNG.normal(size=(8, 8)) for _ in range(3))
MESHES: list[dict[str, int]] = [{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 4}]


def recorded(mesh: dtensor.Mesh, function: Callable, *given: Any) -> list[str]:
    """Kinds of the collectives that run."""
    return [one.kind for one in Stitcher(lowered_program(mesh, function, *given)).recorded]


def gradient(x: Any, *kernels: Any, rank: int = 2) -> Any:
    """That of what several kernels take, and a residual connection."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.add_n([tf.reduce_sum(tf.tanh(product(x, one, rank))) for one in kernels])
        loss += tf.reduce_sum(x * x * x)
    return tape.gradient(loss, x)


def product(x: Any, kernel: Any, rank: int) -> Any:
    """As a layer multiplies rows of a sequence: flattened."""
    if rank == 2:
        return x @ kernel
    return tf.reshape(tf.reshape(x, (-1, 8)) @ kernel, (2, 4, 8))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("rank", [2, 3])
def test_the_gradient_of_what_several_kernels_take(axes: dict[str, int], rank: int) -> None:
    mesh, _ = inner_mesh(**axes)
    x = X if rank == 2 else X.reshape(2, 4, 8)
    kernels = (W, V, W + V)
    given = [cut(x, mesh, *([None] * rank)), *(cut(one, mesh, None, "a") for one in kernels)]
    function = lambda x, *kernels: gradient(x, *kernels, rank=rank)  # noqa: E731
    found, program = run(mesh, function, *given)
    expected = gradient(*map(tf.constant, (x, *kernels)), rank=rank)
    np.testing.assert_allclose(whole(found), expected, rtol=1e-12)
    (one,) = Stitcher(program).recorded
    assert (one.kind, one.axis, one.bytes) == ("all-reduce", ("a",), X.nbytes)
    assert [one.kind for one in program.collectives] == ["all-reduce"] * 3  # DTensor's own


def block(kind: str, x: Any, w: Any, v: Any, b: Any, c: Any) -> Any:
    """Sums of products that are sums over devices."""
    first, second = x @ w, tf.tanh(x) @ v
    match kind:
        case "branches":
            return first + second
        case "with a residual":
            return (b + first) + second
        case "and residuals between":
            return tf.add_n([b, first, b * b, second]) + x @ (w + v)
        case "with biases":
            return tf.nn.bias_add(first, c) + tf.nn.bias_add(second, 2.0 * c)
        case "with spread operands":
            return c + (first + c[:1]) + (second + b[:, :1])
        case "taken twice":
            return tf.stack([first + second, first])
        case "not in all dims":
            return first + second[:1]
        case "a maximum":
            return tf.reduce_max(x, 1) + tf.reduce_sum(x, 1)
        case "through a sum":
            terms = [tf.add_n([first, second]), b, x @ (w * v)]
            return tf.add_n([tf.reshape(one, (4, 16)) for one in terms])
    raise ValueError(kind)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("branches", 1),
        ("with a residual", 1),
        ("and residuals between", 1),
        ("with biases", 1),
        ("with spread operands", 1),
        ("through a sum", 1),
        ("taken twice", 2),
        ("not in all dims", 2),
        ("a maximum", 2),
        ("of another axis", 2),
    ],
)
def test_branches_that_are_added(kind: str, count: int) -> None:
    """One where the sum of sums is a sum; what is needed by itself, or spread, stays."""
    mesh, _ = inner_mesh(a=2, b=2)
    b = "b" if kind == "of another axis" else None
    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None), cut(V, mesh, b or "a", None)]
    given += [cut(X + V, mesh, None, b), cut(V[0], mesh, None)]
    function = (lambda x, w, v, r, c: x @ w + r @ v) if b else lambda *t: block(kind, *t)
    found, _ = run(mesh, function, *given)
    expected = function(*map(tf.constant, (X, W, V, X + V, V[0])))
    np.testing.assert_allclose(whole(found), expected, rtol=1e-12, atol=1e-12)
    assert recorded(mesh, function, *given) == ["all-reduce"] * count


@pytest.mark.parametrize("biased", [True, False])
def test_the_layers_of_all_are_told(biased: bool) -> None:
    """DTensor adds up first too, if nothing lies between."""
    mesh, _ = inner_mesh(a=4)

    def function(x: Any, w: Any, v: Any, b: Any) -> Any:
        with tf.name_scope("net/one"):
            first = x @ w
        with tf.name_scope("net/two"):
            second = x @ v
        return first + (second + b if biased else second)

    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None), cut(V, mesh, "a", None)]
    given += [cut(V[0], mesh, None)]
    layers = ["net/one", "net/two"]
    (one,) = Stitcher(lowered_program(mesh, function, *given, layers=layers)).recorded
    assert one.layer == "net/one+two"


def test_many_ways_to_one_term() -> None:
    """Layers of terms are looked for once, however often one is added to itself."""
    mesh, _ = inner_mesh(a=4)

    def function(x: Any, w: Any, v: Any) -> Any:
        first, second = x @ w, x @ v
        for _ in range(60):
            first, second = first + second, first
        return first

    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None), cut(V, mesh, "a", None)]
    assert recorded(mesh, function, *given) == ["all-reduce"]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sums_of_scattered_sums_are_one(axes: dict[str, int]) -> None:
    """As is the gradient of what several cut kernels take."""
    mesh, _ = inner_mesh(**axes)
    kernels = [cut(one, mesh, None, "a") for one in (W, V, W + V)]

    def function(x: Any, *kernels: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = laid_out(x, mesh, None, None)
            loss = tf.add_n([tf.reduce_sum(tf.tanh(h @ one)) for one in kernels])
        return tape.gradient(loss, x)

    given = [cut(X, mesh, "a", None), *kernels]
    found, program = run(mesh, function, *given)
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant(X))
        loss = tf.add_n([tf.reduce_sum(tf.tanh(x @ one)) for one in (W, V, W + V)])
    np.testing.assert_allclose(whole(found), tape.gradient(loss, x), rtol=1e-12)
    assert recorded(mesh, function, *given) == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize("join", ["add", "add_n", "sub", "broadcast", "twice", "chain", "nested"])
def test_additions_of_scattered_sums(join: str) -> None:
    mesh, _ = inner_mesh(a=4)
    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None), cut(V, mesh, "a", None)]
    whole_x = X

    def function(x: Any, w: Any, v: Any, lay: Callable = lambda t: t) -> Any:
        first, second = lay(x @ w), lay(x @ v)
        if join == "add":
            return first + second
        if join == "add_n":
            return tf.add_n([first, lay(tf.tanh(x @ w)), second])
        if join == "sub":
            return first - second
        if join == "broadcast":
            return first + lay(tf.reduce_sum(x @ v, 0, keepdims=True) + 0.0 * (x @ w)[:1])
        if join == "twice":
            return first + first
        third = lay(x @ (w + v))
        return third + (first + second) if join == "chain" else (first + second) + third

    found, program = run(
        mesh, lambda *t: function(*t, lay=lambda y: laid_out(y, mesh, None, "a")), *given
    )
    expected = function(*map(tf.constant, (whole_x, W, V)))
    np.testing.assert_allclose(whole(found), expected, rtol=1e-12, atol=1e-12)
    kinds = [one.kind for one in Stitcher(program).recorded]
    wanted = {"add": 1, "add_n": 2, "sub": 2, "twice": 1, "chain": 1, "nested": 1}
    if join in wanted:
        assert kinds.count("reduce-scatter") == wanted[join], kinds
