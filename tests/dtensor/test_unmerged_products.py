"""Products of factors with heads leave heads cut, and only gradients of factors travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.body import Body
from kdist.dtensor.unmerged_products import unmerge_products

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, run, specs, whole

WIDTH, HEADS, HEAD, RANK = 8, 4, 6, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, WIDTH))
HEADED = RNG.normal(size=(3, 5, HEADS, HEAD))


def adapted(equation: str, cast: bool = False) -> Callable:
    """A product by a kernel and what adapts it, as Keras computes it, and gradients of factors."""

    def function(x: Any, kernel: Any, first: Any, second: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([first, second])
            a, b = (tf.cast(t, tf.float32) if cast else t for t in (first, second))
            product = tf.tensordot(a, b, axes=[[-1], [0]])
            kernel = kernel + 2.0 * tf.cast(product, kernel.dtype)
            loss = tf.reduce_sum(tf.sin(tf.einsum(equation, x, kernel)))
        return loss, *tape.gradient(loss, [first, second])

    return function


CASES = {
    # Einsum, input and its layout, sizes of the kernel, and which of its dims is cut.
    "heads are made": ("abc,chd->abhd", X, (None,) * 3, (WIDTH, HEADS, HEAD), 1),
    # The gradient of the kernel comes cut along its first dim; DTensor's einsum of it with a
    # factor that is cut along the second would be added up on each device.
    "of a width that is cut": ("abc,chd->abhd", X, (None, None, "model"), (WIDTH, HEADS, HEAD), 1),
    "heads are summed over": (
        *("abhd,hdc->abc", HEADED, (None, None, "model", None)),
        *((HEADS, HEAD, WIDTH), 0),
    ),
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_heads_stay_cut(name: str, cast: bool) -> None:
    equation, x, of_x, shape, dim = CASES[name]
    mesh, _ = inner_mesh(model=2)
    place = ["model" if n == dim else None for n in range(3)]
    kernel, first = RNG.normal(size=shape), RNG.normal(size=(*shape[:-1], RANK))
    second = RNG.normal(size=(RANK, shape[-1]))
    function = adapted(equation, cast)
    found, program = run(
        mesh,
        function,
        cut(x, mesh, *of_x),
        cut(kernel, mesh, *place),
        cut(first, mesh, *place),
        cut(second, mesh, None, None),
    )
    expected = function(*map(tf.constant, (x, kernel, first, second)))
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), right, rtol=1e-4 if cast else 1e-11)
    assert specs(found[1]) == tuple(place)
    if name == "of a width that is cut":
        return
    assert {one.kind for one in program.collectives} == {"all-reduce"}
    size = 4 if cast else 8
    (of_factor,) = (one for one in program.collectives if one.bytes == RANK * shape[-1] * size)
    assert sum(one.bytes for one in program.collectives if one is not of_factor) <= x.nbytes
    assert program.islands == ()


def rewritten(
    function: Callable, *shapes: tuple[int | None, ...], over: str = "behind"
) -> tuple[int, list[str]]:
    mesh, _ = inner_mesh(model=2)
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    body = Body(tf.function(function, autograph=False).get_concrete_function(*specs))
    dims = {"behind": (None, "model", None), "first": ("model", None, None)}.get(over, [None] * 3)
    places = [dims[: len(shapes[0])], (None, None)]
    layouts = [dtensor.Layout([d or dtensor.UNSHARDED for d in one], mesh) for one in places]
    return unmerge_products(body, layouts), sorted(node.op for node in body.nodes.values())


def tensordot(x: Any, w: Any) -> Any:
    return tf.tensordot(x, w, axes=[[-1], [0]])


def test_products_that_merge_well_stay_matrix_products() -> None:
    count, kinds = rewritten(tensordot, (2, 4, 4), (4, 5))
    assert count == 1
    assert kinds.count("Einsum") == 1
    assert not {"MatMul", "Reshape"} & set(kinds)
    # The first dim is cut, or nothing is: rows that a device has are merged there.
    assert rewritten(tensordot, (2, 4, 4), (4, 5), over="first")[0] == 0
    assert rewritten(tensordot, (2, 4, 4), (4, 5), over="nothing")[0] == 0
    # No argument; sizes that are not known; two dims; merged otherwise.
    assert rewritten(lambda x, w: tensordot(tf.tanh(x), w), (2, 4, 4), (4, 5))[0] == 0
    assert rewritten(tensordot, (None, 4, 4), (4, 5))[0] == 0
    assert rewritten(tensordot, (4, 4), (4, 5))[0] == 0
    assert rewritten(lambda x, w: tf.reshape(x, (2, 16)) @ w, (2, 4, 4), (16, 5))[0] == 0


def test_what_else_reads_the_matrix_keeps_it() -> None:
    def function(x: Any, w: Any) -> Any:
        rows = tf.reshape(x, (8, 4))
        product = rows @ w
        return tf.reshape(product, (2, 4, 5)), tf.reduce_sum(product), rows

    count, kinds = rewritten(function, (2, 4, 4), (4, 5))
    assert count == 1
    assert {"Einsum", "MatMul", "Reshape"} <= set(kinds)
