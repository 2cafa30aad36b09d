"""Operations written as others that DTensor expands: one row for each entry of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.body import Body
from kdist.dtensor.indexing import indexing
from kdist.dtensor.rewrites import (
    CONCAT,
    PRODUCT,
    SLICE,
    SLICE_GRADIENT,
    SQUEEZE,
    STACK,
    TABLE,
    UNSTACK,
    rewrite,
    with_dims_from_the_front,
)

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, run, specs, whole

X = np.random.default_rng(0).normal(size=(4, 6))
NEW = tf.newaxis
INDEXED: dict[str, Callable] = {
    "first": lambda x: x[NEW],
    "inner": lambda x: x[:, NEW],
    "last": lambda x: x[..., NEW],
    "before the last": lambda x: x[..., NEW, :],
    "two": lambda x: x[NEW, :, NEW],
    "of rows": lambda x: x[1:3, NEW],
    "of one row": lambda x: x[1, NEW],
}


def with_gradient(operation: Callable) -> Callable:
    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(tf.sin(x))
            loss = tf.reduce_sum(y * tf.cos(y))
        return y, tape.gradient(loss, x)

    return function


@pytest.mark.parametrize("name", INDEXED)
def test_new_axes_and_their_gradients_leave_columns_cut(name: str) -> None:
    """Entries `StridedSlice` and `StridedSliceGrad`: not even what is cut is gathered."""
    mesh, _ = inner_mesh(model=2)
    function = with_gradient(INDEXED[name])
    found, program = run(mesh, function, cut(X, mesh, None, "model"))
    for one, expected in zip(found, function(tf.constant(X)), strict=True):
        np.testing.assert_allclose(whole(one), expected, rtol=1e-12)
    assert specs(found[1]) == (None, "model")
    assert program.islands == ()
    assert not [one for one in program.collectives if one.kind != "all-reduce"]


def test_a_concatenation_counts_its_dim_from_the_front() -> None:
    """Entry `ConcatV2`: along dim -1, DTensor would join the parts of each device."""
    mesh, _ = inner_mesh(model=2)
    function = lambda x, y, z: tf.concat([x, y], -1) * z  # noqa: E731
    given = [X, X + 1.0, np.concatenate([X, X], 1)]
    found, _ = run(mesh, function, *(cut(one, mesh, None, "model") for one in given))
    np.testing.assert_allclose(whole(found), function(*map(tf.constant, given)))
    found, program = run(mesh, function, *(cut(one, mesh, "model", None) for one in given))
    assert specs(found) == ("model", None)
    assert program.islands == () and program.collectives == ()


def test_so_it_does_in_programs_of_many_sizes() -> None:
    traced = tf.function(lambda x, y: tf.concat([x, y], -1) + 0.0, autograph=False)
    spec = tf.TensorSpec((None, 3))
    graph = traced.get_concrete_function(spec, spec).graph
    definition = with_dims_from_the_front(graph)
    made = tf.graph_util.import_graph_def  # as `hoist` does
    with tf.Graph().as_default() as copy:
        made(definition, name="")
    (concat,) = (one for one in copy.get_operations() if one.type == "ConcatV2")
    assert tf.get_static_value(concat.inputs[-1]) == 1


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_int8_stay_cut(rows: bool, transposed: bool) -> None:
    """Entry `BatchMatMulV3`: its parts are multiplied, and only sums of parts travel."""
    mesh, _ = inner_mesh(model=2)
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-128, 128, shape).astype("int8") for shape in ((3, 6), (6, 4)))
    if transposed:
        x = x.T
    place = ("model", None) if rows else (None, "model")

    def function(x: Any, w: Any) -> Any:
        return tf.linalg.matmul(x, w, transpose_a=transposed, output_type=tf.int32)

    found, program = run(mesh, function, cut(x, mesh, None, None), cut(w, mesh, *place))
    expected = (x.T if transposed else x).astype("int32") @ w.astype("int32")
    np.testing.assert_array_equal(whole(found), expected)
    assert program.islands == ()
    assert [one.kind for one in program.collectives] == ["all-reduce"] * rows
    assert specs(found) == ((None, None) if rows else (None, "model"))


def test_queries_that_are_unstacked_are_cut_as_the_bias_of_their_heads() -> None:
    """Entry `Unpack`: where only what comes of it says how it is cut, DTensor fails."""
    mesh, _ = inner_mesh(model=2)

    def function(x: Any, w: Any, bias: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([w, bias])
            heads = tf.reshape(x @ w, (2, 4, 3, 2, 4))
            q, k, v = tf.unstack(tf.transpose(heads, (2, 0, 3, 1, 4)))
            scores = tf.matmul(q, k, transpose_b=True) + bias[None]
            y = tf.matmul(tf.nn.softmax(scores), v)
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, [w, bias])

    rng = np.random.default_rng(2)
    x, w, bias = rng.normal(size=(8, 6)), rng.normal(size=(6, 24)), rng.normal(size=(2, 4, 4))
    axes = (None, None), (None, "model"), ("model", None, None)
    given = [cut(one, mesh, *place) for one, place in zip((x, w, bias), axes)]
    found, program = run(mesh, function, *given)
    expected = function(*map(tf.constant, (x, w, bias)))
    for one, reference in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-12, atol=1e-14)
    assert program.islands == ()


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("axes", [(None, "model"), ("model", None)], ids=str)
def test_stacks_of_what_is_cut_and_what_is_not(axes: tuple[str | None, ...], dim: int) -> None:
    """Entries `Pack` and, for the gradient, `Unpack`: nothing is gathered, nor an island."""
    mesh, _ = inner_mesh(model=2)

    def function(x: Any, z: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cos(tf.stack([tf.sin(x), z, x], axis=dim))
            loss = tf.reduce_sum(y * y * tf.reshape(tf.range(72.0, dtype=y.dtype), y.shape))
        return y, tape.gradient(loss, x)

    found, program = run(mesh, function, cut(X, mesh, *axes), cut(X + 1, mesh, None, None))
    expected = function(tf.constant(X), tf.constant(X + 1))
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-12, atol=1e-12)
    assert specs(found[1]) == axes and "model" in specs(found[0])
    assert program.islands == () and program.collectives == ()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", [(None, "model"), ("model", None)], ids=str)
def test_an_unstacked_dim_is_gathered_only_if_it_is_cut(axes: Any, dim: int) -> None:
    mesh, _ = inner_mesh(model=2)
    function = lambda x: tuple(tf.unstack(tf.sin(x), axis=dim))  # noqa: E731
    found, program = run(mesh, function, cut(X, mesh, *axes))
    for one, expected in zip(found, function(tf.constant(X)), strict=True):
        np.testing.assert_allclose(whole(one), expected, rtol=1e-12)
    gathered = [one.kind for one in program.collectives]
    assert gathered == (["all-gather"] if axes[dim] else [])
    assert program.islands == ()


def test_a_stack_of_one() -> None:
    mesh, _ = inner_mesh(model=2)
    found, program = run(mesh, lambda x: tf.stack([tf.sin(x)], 1), cut(X, mesh, None, "model"))
    np.testing.assert_allclose(whole(found), np.sin(X)[:, None])
    assert specs(found) == (None, None, "model") and program.islands == ()


def test_shapes_that_are_stacked_stay_as_they_are() -> None:
    traced = tf.function(lambda x: tf.stack([tf.shape(x)[0], 2]), autograph=False)
    body = Body(traced.get_concrete_function(tf.TensorSpec((None, 3))))
    assert rewrite(body) == 0 and any(node.op == STACK for node in body.nodes.values())


def test_what_waited_for_an_unstacked_tensor_waits_for_its_parts() -> None:
    def function(x: Any) -> Any:
        parts = tf.unstack(x)
        with tf.control_dependencies([parts[1].op]):
            return tf.identity(x) + 1.0

    body = Body(tf.function(function).get_concrete_function(tf.TensorSpec((2, 3))))
    assert rewrite(body) == 1
    known = {f"^{name}" for name in body.nodes}
    assert all(one in known for node in body.nodes.values() for one in node.input if "^" in one)


def test_the_table_has_these_rows_and_leaves_others_alone() -> None:
    assert set(TABLE) == {SLICE, SLICE_GRADIENT, CONCAT, PRODUCT, STACK, UNSTACK, SQUEEZE}
    for operation, count in ((lambda x: x[:, 1:3], 0), (lambda x: x[..., NEW], 2)):
        traced = tf.function(with_gradient(operation), autograph=False)
        body = Body(traced.get_concrete_function(tf.TensorSpec(X.shape, X.dtype)))
        assert rewrite(body) == count
        assert not any(node.attr["new_axis_mask"].i for node in body.nodes.values())


_ENTRY = st.one_of(
    st.just(None),
    st.integers(0, 1),
    st.builds(slice, st.none() | st.integers(0, 1), st.none() | st.integers(1, 2)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_ENTRY, max_size=4), st.integers(0, 4), st.data())
def test_an_index_is_spelled_out_dim_by_dim(entries: list[Any], at: int, data: Any) -> None:
    """What a slice and new axes make of an array is what NumPy's index makes of it."""
    ellipsis = data.draw(st.booleans())
    array = np.arange(3**4).reshape((3,) * 4)
    index = [*entries[:at], *([...] if ellipsis else []), *entries[at:]]
    masks = dict.fromkeys(
        ("begin_mask", "end_mask", "shrink_axis_mask", "new_axis_mask", "ellipsis_mask"), 0
    )
    rows = []
    for i, one in enumerate(index):
        begin, end = 0, 0
        if one is None:
            masks["new_axis_mask"] |= 1 << i
        elif one is ...:
            masks["ellipsis_mask"] |= 1 << i
        elif isinstance(one, slice):
            begin, end = one.start or 0, one.stop or 0
            masks["begin_mask"] |= (one.start is None) << i
            masks["end_mask"] |= (one.stop is None) << i
        else:
            begin, end = one, one + 1
            masks["shrink_axis_mask"] |= 1 << i
        rows.append((begin, end, 1))
    bounds = tuple(np.array(column) for column in zip(*rows)) if rows else (np.array([]),) * 3
    found = indexing(masks, bounds, array.ndim)  # type: ignore[arg-type]
    made = tf.raw_ops.StridedSlice(
        input=array,
        begin=np.array(found.begin, int),
        end=np.array(found.end, int),
        strides=np.array(found.strides, int),
        **found.masks,
    ).numpy()
    for position in found.new:
        made = np.expand_dims(made, position)
    np.testing.assert_array_equal(made, array[tuple(index)])
    if found.takes_all:
        assert made.size == array.size


def test_statistics_without_their_dims_of_size_1_stay_cut() -> None:
    """Entry `Squeeze`: of whole values, whose mean is to be cut, DTensor fails on it."""
    mesh, _ = inner_mesh(model=2)
    layout = dtensor.Layout(["model"], mesh)

    def statistics(x: Any) -> Any:
        mean = tf.squeeze(tf.reduce_mean(x, 0, keepdims=True), [0])
        return dtensor.relayout(mean, layout) + 1.0, x - mean

    found, program = run(mesh, statistics, cut(X, mesh, None, None))
    np.testing.assert_allclose(whole(found[0]), X.mean(0) + 1.0, rtol=1e-12)
    np.testing.assert_allclose(whole(found[1]), X - X.mean(0), rtol=1e-12, atol=1e-15)
    assert program.islands == ()
    assert specs(found[0]) == ("model",)
