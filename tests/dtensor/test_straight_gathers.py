"""Gathers along any dim, without the transpositions that DTensor writes around them."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, lowered_program, run, whole

X = np.random.default_rng(0).normal(size=(4, 8, 12))


def transpositions(stitcher: Stitcher) -> int:
    return sum(stitcher.nodes[name].op == "Transpose" for name in stitcher.live)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_gather(dim: int) -> None:
    """Its value, its gradient, and what is recorded of it."""
    mesh, _ = inner_mesh(model=4)
    given = [cut(X, mesh, *("model" if i == dim else None for i in range(3)))]

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(dtensor.relayout(x, dtensor.Layout.replicated(mesh, 3)))
        return y, tape.gradient(y, x)

    (found, gradient), program = run(mesh, function, *given)
    np.testing.assert_allclose(whole(found), np.tanh(X), rtol=1e-12)
    np.testing.assert_allclose(whole(gradient), 1 - np.tanh(X) ** 2, rtol=1e-12)
    stitcher = Stitcher(program)
    assert transpositions(stitcher) == 0
    assert transpositions(Stitcher(program, rewired=False)) == 2 * (dim > 0)
    kinds = [(one.kind, one.shape) for one in stitcher.recorded]
    assert kinds == [("all-gather", X.shape)]


def test_a_transposition_of_the_users_stays() -> None:
    mesh, _ = inner_mesh(model=4)
    given = [cut(X, mesh, None, "model", None)]

    def function(x: Any) -> Any:
        all_of_it = dtensor.relayout(x, dtensor.Layout.replicated(mesh, 3))
        return tf.transpose(all_of_it, (2, 0, 1)), tf.transpose(x, (1, 0, 2))

    (found, parts), program = run(mesh, function, *given)
    np.testing.assert_array_equal(whole(found), X.transpose(2, 0, 1))
    np.testing.assert_array_equal(whole(parts), X.transpose(1, 0, 2))
    assert transpositions(Stitcher(program)) == 2


def test_the_graph_of_a_function_that_others_have_is_not_changed() -> None:
    mesh, _ = inner_mesh(model=4)
    given = [cut(X, mesh, None, "model", None)]
    whole_layout = dtensor.Layout.replicated(mesh, 3)
    program = lowered_program(mesh, lambda x: dtensor.relayout(x, whole_layout), *given)
    before = program.definition.SerializeToString(deterministic=True)
    assert Stitcher(program).begins
    assert program.definition.SerializeToString(deterministic=True) == before
