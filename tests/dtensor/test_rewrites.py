"""Operations written as others that DTensor expands: one row for each entry of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor.body import Body
from kdist.dtensor.rewrites import (
    CONCAT,
    PRODUCT,
    SLICE,
    SLICE_GRADIENT,
    TABLE,
    indexing,
    rewrite,
    with_dims_from_the_front,
)

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_the_table_has_these_rows_and_leaves_others_alone() -> None:
    assert set(TABLE) == {SLICE, SLICE_GRADIENT, CONCAT, PRODUCT}
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
