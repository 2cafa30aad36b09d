"""Sums that are scattered: which, how many, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.stitching import Stitcher
from kdist.graphs import executed

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, laid_out, lowered_program, run, specs, whole

RNG = np.random.default_rng(0)
X, W, V = (RNG.normal(size=(8, 8)) for _ in range(3))
MESHES: list[dict[str, int]] = [{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 4}]


def recorded(mesh: dtensor.Mesh, function: Callable, *given: Any) -> list[str]:
    """Kinds of the collectives that run."""
    return [one.kind for one in Stitcher(lowered_program(mesh, function, *given)).recorded]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("dims", [("a", None), (None, "a")], ids=str)
def test_a_sum_in_parts(axes: dict[str, int], dims: tuple[str | None, ...]) -> None:
    """Along the first dim and another, reshaped on the way, over one axis of one and of several."""
    mesh, _ = inner_mesh(**axes)
    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None)]
    functions: list[Callable] = [
        lambda x, w: laid_out(x @ w, mesh, *dims),
        lambda x, w: laid_out(tf.reshape(x @ w, (2, 4, 8)), mesh, None, *dims),
    ]
    for function in functions:
        result, program = run(mesh, function, *given)
        assert specs(result)[-2:] == dims
        value = np.reshape(
            X @ W,
            result.layout.global_shape_from_local_shape(tf.TensorShape(result.parts[0].shape)),
        )
        np.testing.assert_allclose(whole(result), value, rtol=1e-12)
        found = Stitcher(program).recorded
        assert [(one.kind, one.axis, one.bytes) for one in found] == [
            ("reduce-scatter", ("a",), X.nbytes)
        ]
        # DTensor's own were an all-reduce, and are as they were for who lifts the program.
        assert [one.kind for one in program.collectives] == ["all-reduce"]
        assert [one.kind for one in Stitcher(program, rewired=False).recorded] == ["all-reduce"]


def test_each_member_adds_up_its_part() -> None:
    mesh, _ = inner_mesh(model=4)
    given = [cut(X, mesh, None, "model"), cut(W, mesh, "model", None)]
    program = lowered_program(mesh, lambda x, w: laid_out(x @ w, mesh, None, "model"), *given)
    stitched = Stitcher(program).stitch([f"/device:CPU:{k}" for k in range(4)])

    @tf.function(autograph=False)
    def step() -> Any:
        return stitched([[t.parts[k] for t in given] for k in range(4)])[1]

    (function,) = [f for f in executed.watch(step) if f.select("AddN")]
    assert function.count("AddN") == {f"/device:CPU:{k}": 1 for k in range(4)}
    assert {node.shape for node in function.select("AddN")} <= {(8, 2), None}


def test_a_sum_that_is_needed_whole_is_not_scattered() -> None:
    mesh, _ = inner_mesh(a=4)
    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None)]

    def both(x: Any, w: Any) -> Any:
        product = x @ w
        return laid_out(product, mesh, None, None), laid_out(product, mesh, "a", None)

    def two_ways(x: Any, w: Any) -> Any:
        product = x @ w
        return laid_out(product, mesh, "a", None), laid_out(product, mesh, None, "a")

    def a_maximum(x: Any, w: Any) -> Any:
        return laid_out(tf.reduce_max(x, 1), mesh, "a")

    for function, expected in (
        (both, [X @ W, X @ W]),
        (two_ways, [X @ W, X @ W]),
        (a_maximum, [X.max(1)]),
    ):
        found, _ = run(mesh, function, *given)
        for one, other in zip(tf.nest.flatten(found), expected, strict=True):
            np.testing.assert_allclose(whole(one), other, rtol=1e-12)
        assert recorded(mesh, function, *given) == ["all-reduce"], function


@pytest.mark.parametrize("dims", [("a", None), (None, "a")], ids=str)
def test_a_bias_is_added_to_parts(dims: tuple[str | None, ...]) -> None:
    """To those of rows; along the bias itself, DTensor may cut first. Its gradient is of all."""
    mesh, _ = inner_mesh(a=4)
    given = [cut(X, mesh, None, "a"), cut(W, mesh, "a", None), cut(V[0], mesh, None)]

    def function(x: Any, w: Any, b: Any, lay: Callable = lambda t: t) -> Any:
        @tf.custom_gradient
        def moved(value: Any) -> Any:
            return lay(value), lambda d: d

        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = moved(tf.nn.bias_add(x @ w, b))
            loss = tf.reduce_sum(tf.tanh(y))
        return y, tape.gradient(loss, [x, w, b])

    laid = lambda *t: function(*t, lay=lambda y: laid_out(y, mesh, *dims))  # noqa: E731
    found, _ = run(mesh, laid, *given)
    expected = function(*map(tf.constant, (X, W, V[0])))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(whole(one), other, rtol=1e-12, atol=1e-12)
    assert recorded(mesh, laid, *given)[0] == "reduce-scatter"
