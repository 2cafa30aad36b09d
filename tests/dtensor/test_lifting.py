"""One program for all sizes, from programs for a few: its numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor import relayout
from kdist.dtensor.hoisting import hoist
from kdist.dtensor.lifting import lift
from kdist.dtensor.lowered_program import Function, LoweredProgram
from kdist.dtensor.lowering import lower
from kdist.dtensor.sizes import CannotLift, Examples
from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, whole

EXAMPLES = ((4, 12), (6, 16), (2, 28), (10, 20), (8, 36))
FAR = ((2, 4), (80, 400))
OTHERS = ((2, 4), (12, 8), (6, 100), (4, 16))
Dims = tuple[str | None, ...]


def lifted(
    mesh: dtensor.Mesh, function: Callable, dims: Dims, examples: Any = EXAMPLES
) -> LoweredProgram:
    """A program of a function of x: (rows, length, 8), cut as said, and a matrix: (8, 6)."""
    specs = [tf.TensorSpec((None, None, 8), tf.float64), tf.TensorSpec((8, 6), tf.float64)]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    layouts = [
        cut(np.zeros((4, 4, 8)), mesh, *dims).layout,
        cut(np.zeros((8, 6)), mesh, None, None).layout,
    ]
    given = Examples(*(tuple((*one, 8) for one in sizes) for sizes in (examples, FAR)))
    hoisted = hoist(concrete, [given, None])
    layouts += [dtensor.Layout.replicated(mesh, m.spec.shape.rank) for m in hoisted.made]
    with relayout.lowering(mesh):
        programs = [
            lower(Function.of(hoisted.concrete, one), mesh, layouts) for one in hoisted.shapes
        ]
    return lift(programs, hoisted, layouts)


def check(program: LoweredProgram, mesh: dtensor.Mesh, function: Callable, dims: Dims) -> None:
    """Calls a program with sizes that it was not made for."""
    stitched = Stitcher(program).stitch(["/device:CPU:0", "/device:CPU:1"])
    random = np.random.default_rng(0)
    specs = [tf.TensorSpec((None, None, None), tf.float64)] * 2
    specs += [tf.TensorSpec((8, 6), tf.float64)] * 2

    @tf.function(autograph=False, input_signature=specs)
    def step(*parts: Any) -> Any:
        names = {one.name: one.position for one in program.arguments}
        taken = [names[r] or 0 for r in stitched.chunk.takes]
        return stitched([[parts[2 * p + k] for p in taken] for k in range(2)])[1]

    for rows, length in OTHERS:
        x, w = random.normal(size=(rows, length, 8)), random.normal(size=(8, 6))
        given = [cut(x, mesh, *dims), cut(w, mesh, None, None)]
        found = step(*(part for one in given for part in one.parts))
        expected = tf.nest.flatten(function(tf.constant(x), tf.constant(w)))
        for i, wanted in enumerate(expected):
            layout = program.layouts[i]
            value = whole(type(given[0])(tuple(mine[i] for mine in found), layout))
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12)


def causal(x: Any, w: Any) -> Any:
    """Attention that looks back, with positions."""
    length = tf.shape(x)[1]
    x += tf.cast(tf.range(length), x.dtype)[:, tf.newaxis] / 100
    scores = tf.einsum("bqd,bkd->bqk", x, x)
    seen = tf.linalg.band_part(tf.ones([length, length], tf.bool), -1, 0)
    return tf.nn.softmax(tf.where(seen, scores, -1e9)) @ x @ w


def flattened(x: Any, w: Any) -> Any:
    rows, length = tf.unstack(tf.shape(x)[:2])
    flat = tf.reshape(x, [rows * length, 8]) @ w
    return tf.reshape(flat, [rows, length // 2 * 2, 6]) / tf.cast(rows * length, x.dtype)


def shifted(x: Any, w: Any) -> Any:
    """The next one, and one more; a part that depends on the length."""
    length = tf.shape(x)[1]
    later = tf.concat([x[:, 1:], x[:, :1]], 1)
    return (later + x)[:, : length - 1], tf.pad(x, [[0, 0], [0, 3], [0, 0]])


def windows(x: Any, w: Any) -> Any:
    pooled = tf.nn.avg_pool1d(x, 2, 2, "SAME")
    return tf.reshape(pooled, [tf.shape(x)[0], -1]), tf.reduce_mean(x), tf.reduce_sum(x, 1)


def gradients(x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = tf.reduce_mean(causal(x, w) ** 2) + tf.reduce_sum(flattened(x, w))
    return tape.gradient(loss, [x, w])


FUNCTIONS = [causal, flattened, shifted, windows, gradients]
CUTS: list[Dims] = [(None, None, None), (None, None, "a"), ("a", None, None), (None, "a", None)]


# What DTensor cannot expand at any size: it pools whole windows, and slices whole dims.
REFUSED = {(shifted, CUTS[3]), (windows, CUTS[1]), (windows, CUTS[3]), (gradients, CUTS[3])}


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        pytest.param(f, dims, marks=[] if dims[0] else pytest.mark.long)
        for f in FUNCTIONS
        for dims in CUTS
        if (f, dims) not in REFUSED
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_sizes_that_were_never_lowered(function: Callable, dims: Dims) -> None:
    mesh, _ = inner_mesh(a=2)
    program = lifted(mesh, function, dims)
    check(program, mesh, function, dims)


def test_examples_that_are_sizes_of_something_else() -> None:
    """Constants are one where they happen to be equal: with 6 rows of 8, both shapes are 8 x 6."""

    def function(x: Any, w: Any) -> Any:
        rows, length = tf.unstack(tf.shape(x)[:2])
        return tf.reshape(tf.reduce_sum(x, 2), [length, rows]), tf.reshape(tf.transpose(w), [8, 6])

    mesh, _ = inner_mesh(a=2)
    for examples in (((6, 8), *EXAMPLES), (*EXAMPLES, (6, 8))):
        program = lifted(mesh, function, (None, None, None), examples)
        check(program, mesh, function, (None, None, None))


def test_a_program_has_no_example_in_it() -> None:
    """No constant is an example's size, and no mask a constant."""
    mesh, _ = inner_mesh(a=2)
    program = lifted(mesh, causal, (None, None, "a"))
    live = Stitcher(program).live
    for node in program.definition.node_def:
        if node.op == "Const" and node.name in live:
            value = tf.make_ndarray(node.attr["value"].tensor)
            assert value.size < 16 and not {12, 16, 28, 20, 36} & set(value.ravel().tolist())


def test_a_loop_that_computes_with_sizes_is_refused() -> None:
    def looped(x: Any, w: Any) -> Any:
        body = lambda i, y: (i + 1, y + tf.ones([tf.shape(x)[1]], x.dtype))  # noqa: E731
        return tf.while_loop(lambda i, y: i < 3, body, (0, x[0, :, 0]))[1]

    mesh, _ = inner_mesh(a=2)
    with pytest.raises(CannotLift, match="loop or branch that computes with sizes"):
        lifted(mesh, looped, (None, None, None))


def test_a_size_that_examples_do_not_show_bounds_the_program() -> None:
    mesh, _ = inner_mesh(a=2)
    pool = lambda x, w: tf.nn.max_pool1d(x, 40, 40, "SAME")  # noqa: E731
    assert lifted(mesh, pool, (None, None, None)).bounded
    assert not lifted(mesh, flattened, (None, None, None)).bounded


def test_what_follows_from_constants_knows_the_sizes_of_what_it_meets() -> None:
    """Half of an odd length follows from no other size but its tensor's, which comes late."""

    def function(x: Any, w: Any) -> Any:
        half = tf.nn.avg_pool1d(x, 2, 2, "SAME") @ w
        positions = tf.cast(tf.range(tf.shape(half)[1]), x.dtype)
        return positions[tf.newaxis, :, tf.newaxis] * half

    mesh, _ = inner_mesh(a=2)
    odd = ((4, 12), (6, 15), (2, 28), (10, 21), (8, 37))
    check(lifted(mesh, function, CUTS[0], odd), mesh, function, CUTS[0])
