"""Pooling and resizing on parts of channels: values, gradients, and nothing that is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from .dtensor_parts import cut, inner_mesh, run, specs, whole

RNG = np.random.default_rng(0)
X, VOLUME = RNG.normal(size=(4, 6, 8, 8)), RNG.normal(size=(4, 6, 4, 6, 8)).astype("float32")


def resized(method: str) -> Callable:
    return lambda x: tf.cast(tf.image.resize(x, (9, 5), method), x.dtype)


FUNCTIONS: dict[str, tuple[Callable, np.ndarray]] = {
    "maxima": (lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), X),
    "maxima_same": (lambda x: tf.nn.max_pool2d(x, (3, 2), 1, "SAME"), X),
    "means": (lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"), X),
    "maxima_3d": (lambda x: tf.nn.max_pool3d(x, 2, 2, "VALID"), VOLUME),
    "means_3d": (lambda x: tf.nn.avg_pool3d(x, (1, 2, 2), 1, "SAME"), VOLUME),
    "twice": (lambda x: tf.nn.avg_pool2d(tf.nn.max_pool2d(x, 2, 1, "SAME"), 2, 1, "SAME"), X),
    "bilinear": (resized("bilinear"), X),
    "bicubic": (resized("bicubic"), X),
    "nearest": (resized("nearest"), X),
}
CUTS = {"channels": (None, "model"), "rows": ("model", None), "both": ("expert", "model")}


def with_gradient(function: Callable) -> Callable:
    def every(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(function(tf.tanh(x)))
        return y, tape.gradient(y, x)

    return every


@pytest.mark.parametrize("how", list(CUTS))
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_parts_equal_one_device(name: str, how: str) -> None:
    function, x = FUNCTIONS[name]
    rows, channels = CUTS[how]
    mesh, _ = inner_mesh(data=1, expert=2, model=2)
    part = cut(x, mesh, rows, *(None,) * (x.ndim - 2), channels)
    expected = with_gradient(function)(tf.constant(x))
    found, program = run(mesh, with_gradient(function), part, channels=True)
    for one, reference in zip(found, expected, strict=True):
        close = 1e-11 if x.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(whole(one), reference, rtol=close, atol=close)
        assert (specs(one)[0], specs(one)[-1]) == (rows, channels)
    assert (program.islands, program.collectives) == ((), ())


def test_gradients_of_gradients() -> None:
    mesh, _ = inner_mesh(model=2)

    def twice(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(tf.nn.max_pool2d(x, 2, 2, "VALID")))
            sums = tf.reduce_sum(tf.square(inner.gradient(y, x)))
        return outer.gradient(sums, x)

    found, program = run(mesh, twice, cut(X, mesh, None, None, None, "model"), channels=True)
    np.testing.assert_allclose(whole(found), twice(tf.constant(X)), rtol=1e-11, atol=1e-11)
    assert program.islands == ()


def test_places_that_are_cut_make_an_island() -> None:
    """A device lacks what lies next to its part."""
    mesh, _ = inner_mesh(model=2)
    function = FUNCTIONS["maxima_same"][0]
    part = cut(X, mesh, None, "model", None, None)
    found, program = run(mesh, with_gradient(function), part, channels=True)
    for one, reference in zip(found, with_gradient(function)(tf.constant(X)), strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11)
    assert any("MaxPool" in island.title for island in program.islands)


def test_a_size_that_is_no_constant_stays() -> None:
    mesh, _ = inner_mesh(model=2)

    def by_value(x: Any, size: Any) -> Any:
        return tf.ensure_shape(tf.image.resize(x, size), (4, 9, 5, 8))

    size = cut(np.array([9, 5], np.int32), mesh, None)
    part = cut(X, mesh, None, None, None, "model")
    found, program = run(mesh, by_value, part, size, channels=True)
    np.testing.assert_allclose(whole(found), by_value(X, [9, 5]), rtol=1e-6)
    assert any("ResizeBilinear" in island.title for island in program.islands)


@pytest.mark.parametrize("name", ["bilinear", "maxima", "means"])
def test_in_a_layer_of_ones_own(name: str) -> None:
    """Where channels are not known to be cut: DTensor has no rule, or one that sends."""
    function, x = FUNCTIONS[name]
    mesh, _ = inner_mesh(model=2)
    part = cut(x, mesh, None, None, None, "model")
    expected = with_gradient(function)(tf.constant(x))
    found, program = run(mesh, with_gradient(function), part)
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)
    assert (program.islands, program.collectives) == ((), ())
