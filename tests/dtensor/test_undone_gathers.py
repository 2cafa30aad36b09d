"""Gathers of which devices take their own parts again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, laid_out, run, specs, whole

RNG = np.random.default_rng(0)
MESHES: list[dict[str, int]] = [{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 4}]


def check(function: Callable, x: np.ndarray, mesh: dtensor.Mesh, *dims: str | None) -> list[str]:
    """Compares a function of a cut tensor; returns the kinds of its collectives."""
    found, program = run(mesh, lambda t: function(t, mesh), cut(x, mesh, *dims))
    expected = tf.nest.flatten(function(tf.constant(x), None))
    for one, other in zip(tf.nest.flatten(found), expected, strict=True):
        np.testing.assert_array_equal(whole(one), other)
    return [one.kind for one in Stitcher(program).recorded]


def there_and_back(*dims: str | None) -> Callable:
    def function(t: Any, mesh: dtensor.Mesh | None) -> Any:
        if mesh is None:
            return tf.sin(2.0 * t)
        gathered = laid_out(2.0 * t, mesh, *(None for _ in dims))
        return tf.sin(laid_out(gathered, mesh, *dims))

    return function


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("dims", [("a", None, None), (None, "a", None), (None, None, "a")], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_nothing_travels_there_and_back(axes: dict, dims: tuple, dtype: str) -> None:
    mesh, _ = inner_mesh(**axes)
    x = tf.cast(RNG.normal(size=(8, 4, 4)), dtype).numpy()
    assert check(there_and_back(*dims), x, mesh, *dims) == []


def test_other_parts_and_the_whole_are_gathered() -> None:
    mesh, _ = inner_mesh(a=4)
    x = RNG.normal(size=(8, 8))

    def moved(t: Any, mesh: dtensor.Mesh | None) -> Any:
        if mesh is None:
            return t
        return laid_out(tf.identity(laid_out(t, mesh, None, None)), mesh, None, "a")

    def and_whole(t: Any, mesh: dtensor.Mesh | None) -> Any:
        if mesh is None:
            return t, tf.cumsum(t)
        gathered = laid_out(t, mesh, None, None)
        return laid_out(gathered, mesh, "a", None), tf.cumsum(gathered)

    assert check(moved, x, mesh, "a", None) in (["all-gather"], ["all-to-all"])
    assert check(and_whole, x, mesh, "a", None) == ["all-gather"]


def test_what_was_cut_keeps_its_layout() -> None:
    mesh, _ = inner_mesh(a=2, b=2)
    x = RNG.normal(size=(8, 8))
    found, _ = run(mesh, lambda t: there_and_back("a", "b")(t, mesh), cut(x, mesh, "a", "b"))
    assert specs(found) == ("a", "b")
    np.testing.assert_array_equal(whole(found), np.sin(2.0 * x))
