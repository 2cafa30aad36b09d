"""Summands instead of sums over the axis that cuts the batch: of which functions, and how many."""

from __future__ import annotations

from collections.abc import Callable

from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.partial_sums import Summed
from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, lowered_program

RNG = np.random.default_rng(0)
X, W, B = RNG.normal(size=(8, 4)), RNG.normal(size=(4, 6)), RNG.normal(size=(6,))


def kernel(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """The gradient of a kernel: a sum over rows."""
    return tf.matmul(x, tf.tanh(tf.matmul(x, w) + b), transpose_a=True)


def in_float32(*tensors: tf.Tensor) -> list[tf.Tensor]:
    return [tf.cast(tensor, tf.float32) for tensor in tensors]


FUNCTIONS: dict[str, Callable] = {
    "a kernel": kernel,
    "a bias": lambda x, w, b: tf.reduce_sum(tf.matmul(x, w), 0) * 3.0,
    "transposed": lambda x, w, b: tf.transpose(tf.reshape(-kernel(x, w, b), (2, 2, 6)))[::2],
    "two uses": lambda x, w, b: kernel(x, w, b) + kernel(2.0 * x, w, b),
    "a product with a weight": lambda x, w, b: tf.matmul(kernel(x, w, b), w, transpose_b=True),
    "over a weight": lambda x, w, b: kernel(x, w, b) / (1.0 + w * w),
    "and a penalty": lambda x, w, b: kernel(x, w, b) + 0.1 * w,
    "a difference": lambda x, w, b: 0.1 * w - kernel(x, w, b),
    "parts": lambda x, w, b: tf.concat(tf.split(kernel(x, w, b), 2, 1)[::-1], 1),
    "rows": lambda x, w, b: tf.gather(kernel(x, w, b), [3, 1]),
    "more precise": lambda x, w, b: tf.cast(
        kernel(*(tf.cast(t, tf.float32) for t in (x, w, b))), x.dtype
    ),
}
ALONE: dict[str, Callable] = {
    "a penalty alone": lambda x, w, b: 0.1 * w,
    "a square": lambda x, w, b: tf.square(kernel(x, w, b)),
    "a maximum": lambda x, w, b: tf.reduce_max(x) * w,
    "over a sum": lambda x, w, b: w / tf.reduce_sum(x),
}


def summands(function: Callable, axes: dict[str, int], cuts: bool) -> tuple[list, Stitcher]:
    """Per device what a function of cut rows hands out, and how its program was stitched."""
    mesh, _ = inner_mesh(**axes)
    model = "model" if cuts else None
    inputs = [cut(X, mesh, "rows", None), cut(W, mesh, None, model), cut(B, mesh, model)]

    def whole(*tensors: tf.Tensor) -> tf.Tensor:
        found = function(*tensors)
        return dtensor.relayout(found, dtensor.Layout.replicated(mesh, len(found.shape)))

    program = lowered_program(mesh, whole, *inputs)
    stitcher = Stitcher(program, Summed("rows", (0,)))
    stitched = stitcher.stitch([f"/device:CPU:{k}" for k in range(mesh.size)])
    names = {one.name: one.position for one in program.arguments}

    @tf.function(autograph=False)
    def step() -> list:
        taken = [inputs[names[r]] for r in stitched.chunk.takes]
        return stitched([[t.parts[k] for t in taken] for k in range(mesh.size)])[1]

    return [parts[0].numpy() for parts in step()], stitcher


MESHES = [({"rows": 4}, False), ({"rows": 2, "model": 2}, True), ({"model": 2, "rows": 2}, True)]


@pytest.mark.parametrize(("axes", "cuts"), MESHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_linear_in_a_sum_is_handed_out_in_summands(name, axes, cuts):
    parts, stitcher = summands(FUNCTIONS[name], axes, cuts)
    _check(parts, FUNCTIONS[name], axes, 1e-6 if name == "more precise" else 1e-12)
    assert not stitcher.summands.alone
    assert stitcher.summands.left
    assert not any("rows" in one.axis for one in stitcher.recorded)


@pytest.mark.parametrize(("axes", "cuts"), MESHES, ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_anything_else_is_the_first_coordinates(name, axes, cuts):
    parts, stitcher = summands(ALONE[name], axes, cuts)
    _check(parts, ALONE[name], axes)
    assert stitcher.summands.alone == {0}
    place = stitcher.summands.place
    assert all(not np.any(part) for part, p in zip(parts, place, strict=True) if p)


def both(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """A sum over both axes of (rows, model)."""
    return tf.reduce_sum(tf.tanh(x) * y, (0, 1))


SUMS: dict[str, tuple[Callable, int]] = {
    "joined": (lambda x, y, w: [(both(x, y) + w) + both(y, x)], 1),
    "scattered": (lambda x, y, w: [both(x, y)], 1),
    # Whole it is joined, too, and told beside that of summands.
    "whole too": (lambda x, y, w: [t := (both(x, y) + w) + both(y, x), tf.reduce_sum(t * t)], 2),
}


@pytest.mark.parametrize("name", SUMS)
def test_collectives_over_other_axes_are_told_as_they_run(name: str) -> None:
    """Those of summands, whatever is made of them afterwards."""
    function, count = SUMS[name]
    mesh, _ = inner_mesh(rows=2, model=2)
    x, y, w = RNG.normal(size=(4, 4, 6)), RNG.normal(size=(4, 4, 6)), RNG.normal(size=6)
    inputs = [cut(one, mesh, "rows", "model", None) for one in (x, y)] + [cut(w, mesh, None)]

    def laid_out(*tensors: tf.Tensor) -> list[tf.Tensor]:
        first, *others = function(*tensors)
        dim = "model" if name == "scattered" else dtensor.UNSHARDED
        return [dtensor.relayout(first, dtensor.Layout([dim], mesh)), *others]

    stitcher = Stitcher(lowered_program(mesh, laid_out, *inputs), Summed("rows", (0,)))
    run = {n for n in stitcher.live if stitcher.nodes[n].op in COLLECTIVES}
    assert {one.node for one in stitcher.recorded} == run
    assert len(stitcher.recorded) == len(run) == count
    kinds = {one.kind for one in stitcher.recorded}
    assert kinds == {"reduce-scatter" if name == "scattered" else "all-reduce"}


def test_infinity_times_zero_is_zero():
    parts, _ = summands(lambda x, w, b: w / 0.0, {"rows": 4}, cuts=False)
    assert np.all(np.isinf(parts[0]))
    assert not np.any(parts[1:])


def _check(
    parts: list[np.ndarray], function: Callable, axes: dict[str, int], rtol: float = 1e-12
) -> None:
    """The summands of each line along the axis make up what one device computes."""
    expected = function(*map(tf.constant, (X, W, B)))
    stacked = np.stack(parts).reshape(*axes.values(), *parts[0].shape)
    total = stacked.sum(list(axes).index("rows"))
    for one in total if len(axes) > 1 else [total]:
        np.testing.assert_allclose(one, expected, rtol=rtol)
