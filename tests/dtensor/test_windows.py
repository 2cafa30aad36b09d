"""Convolutions on parts of channels: their values, their gradients, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor import expansion, windows
from kdist.dtensor.islands import CannotCut
from kdist.dtensor.stitching import Stitcher

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, run, specs, whole

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 7, 8))
FILTERS = RNG.normal(size=(3, 2, 8, 10))
EACH = RNG.normal(size=(3, 2, 8, 1))
VOLUME, CUBES = RNG.normal(size=(4, 5, 4, 6, 8)), RNG.normal(size=(2, 3, 1, 8, 10))


def conv2d(x: Any, filters: Any) -> Any:
    return tf.nn.conv2d(x, filters, strides=(2, 1), padding="SAME")


def valid(x: Any, filters: Any) -> Any:
    return tf.nn.conv2d(x, filters, strides=1, padding="VALID")


def explicit(x: Any, filters: Any) -> Any:
    return tf.nn.conv2d(x, filters, strides=1, padding=[[0, 0], [1, 2], [0, 1], [0, 0]])


def each(x: Any, filters: Any) -> Any:
    return tf.nn.depthwise_conv2d(x, filters, (1, 2, 2, 1), "SAME")


def conv3d(x: Any, filters: Any) -> Any:
    return tf.nn.conv3d(x, filters, (1, 2, 1, 1, 1), "SAME")


def transposed(x: Any, filters: Any) -> Any:
    shape = (x.shape[0], 2 * x.shape[1], x.shape[2], 10)
    return tf.nn.conv2d_transpose(x, tf.transpose(filters, (0, 1, 3, 2)), shape, (2, 1), "SAME")


def dilated(x: Any, filters: Any) -> Any:
    return tf.nn.convolution(x, filters, padding="SAME", dilations=(2, 1))


FUNCTIONS: dict[str, tuple[Callable, np.ndarray, np.ndarray]] = {
    "strided": (conv2d, X, FILTERS),
    "valid": (valid, X, FILTERS),
    "explicit": (explicit, X, FILTERS),
    "depthwise": (each, X, EACH),
    "volume": (conv3d, VOLUME, CUBES),
    "transposed": (transposed, X, FILTERS),
    "dilated": (dilated, X, FILTERS),
}
CUTS: dict[str, tuple[str | None, str | None, str | None]] = {
    # What cuts the rows, the channels taken, and those given.
    "filters": (None, None, "model"),
    "channels": (None, "model", None),
    "both": (None, "model", "data"),
    "rows": ("data", "model", None),
    "rows_filters": ("data", None, "model"),
}


def with_gradients(function: Callable) -> Callable:
    def every(x: Any, filters: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, filters])
            y = function(x, filters)
            loss = tf.reduce_sum(tf.sin(y))
        return [y, *tape.gradient(loss, [x, filters])]

    return every


@pytest.mark.parametrize("how", list(CUTS))
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_they_equal_those_of_one_device(name: str, how: str) -> None:
    function, x, filters = FUNCTIONS[name]
    rows, taken, given = CUTS[how]
    by_channel = name == "depthwise"
    if by_channel:
        taken, given = "model", None
    mesh, _ = inner_mesh(data=1, expert=2, model=2)
    named = {"data": "expert", "model": "model", None: None}
    window = (None,) * (x.ndim - 2)
    parts = [
        cut(x, mesh, named[rows], *window, named[taken]),
        cut(filters, mesh, *window, named[taken], named[given]),
    ]
    expected = with_gradients(function)(tf.constant(x), tf.constant(filters))
    found, program = run(mesh, with_gradients(function), *parts, channels=True)
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)
    if name == "dilated" and rows:  # places are moved into rows
        assert {one.operations[0][0] for one in program.islands} == {"SpaceToBatchND"}
        return
    assert program.islands == ()
    assert specs(found[0])[-1] == named[taken if by_channel else given]
    # What channels are summed over, forward and backward, and gradients over rows.
    sums = [taken and not by_channel, given, rows]
    assert [one.kind for one in program.collectives] == ["all-reduce"] * sum(map(bool, sums))


def test_each_device_has_its_part_of_the_arithmetic() -> None:
    mesh, _ = inner_mesh(model=4)
    x, filters = cut(X, mesh, None, None, None, None), FILTERS[..., :8]
    parts = [x, cut(filters, mesh, None, None, None, "model")]
    _, program = run(mesh, with_gradients(valid), *parts, channels=True)
    stitcher = Stitcher(program)
    live = [stitcher.nodes[name] for name in stitcher.live]
    found = [node for node in live if node.op in windows.RULES]
    assert sorted(node.op for node in found) == [
        "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"
    ]  # fmt: skip
    forward = next(node for node in found if node.op == "Conv2D")
    assert list(stitcher.shape(f"{forward.name}:output:0")) == [4, 4, 6, 2]
    # Nothing of what it was lowered as is left.
    assert not [node.op for node in live if node.op in ("Einsum", "BroadcastTo")]


def test_operands_that_are_laid_out_in_another_way_make_an_island() -> None:
    """Rows of pictures cut: DTensor moves them between the operands and what stands for them."""
    mesh, _ = inner_mesh(model=2)
    parts = [cut(X, mesh, None, "model", None, None), cut(FILTERS, mesh, None, None, None, "model")]
    expected = with_gradients(valid)(tf.constant(X), tf.constant(FILTERS))
    found, program = run(mesh, with_gradients(valid), *parts, channels=True)
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)
    assert any("Conv2D" in island.title for island in program.islands)


def test_one_inside_a_loop_is_an_island() -> None:
    mesh, _ = inner_mesh(model=2)
    filters = RNG.normal(size=(3, 3, 8, 8))
    parts = [cut(X, mesh, None, None, None, None), cut(filters, mesh, None, None, None, "model")]

    def looped(x: Any, filters: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return i + 1, tf.nn.conv2d(x, filters, 1, "SAME")

        return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]

    found, program = run(mesh, looped, *parts, channels=True)
    expected = looped(tf.constant(X), tf.constant(filters))
    np.testing.assert_allclose(whole(found), expected, rtol=1e-11, atol=1e-11)
    assert ["inside a function" in island.reason for island in program.islands] == [True]


def test_a_sum_between_an_operand_and_its_product_is_found() -> None:
    """What cannot be put back is told, by name."""
    mesh, _ = inner_mesh(model=2)
    parts = [cut(X, mesh, None, "model", None, None), cut(FILTERS, mesh, None, None, None, None)]
    _, program = run(mesh, valid, *parts, channels=True)
    (island,) = program.islands
    assert "laid out in another way" in island.reason
    assert dtensor.UNSHARDED in program.layouts[0].sharding_specs


@pytest.mark.parametrize("name", ["valid", "depthwise"])
def test_a_result_that_is_to_be_cut_along_the_window(name: str) -> None:
    """A place of what stands for it needs no others, as one of the convolution does."""
    mesh, _ = inner_mesh(model=2)
    function, x, filters = FUNCTIONS[name]
    whole_layout = [dtensor.UNSHARDED] * 4
    layout = dtensor.Layout([dtensor.UNSHARDED, "model", *whole_layout[2:]], mesh)

    def sums(x: Any, filters: Any, cuts: bool = True) -> Any:
        y = function(tf.concat([x, x], 1), filters)[:, :4]
        return tf.reduce_sum(tf.sin(dtensor.relayout(y, layout) if cuts else y), [0, 1, 2])

    expected = with_gradients(lambda *given: sums(*given, cuts=False))(
        tf.constant(x), tf.constant(filters)
    )
    parts = [cut(x, mesh, *[None] * 4), cut(filters, mesh, *[None] * 4)]
    found, _ = run(mesh, with_gradients(sums), *parts, channels=True)
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)


def test_a_result_that_is_cut_along_the_window_at_once() -> None:
    mesh, _ = inner_mesh(model=2)
    layout = dtensor.Layout([dtensor.UNSHARDED, "model", *[dtensor.UNSHARDED] * 2], mesh)
    parts = [cut(X, mesh, *[None] * 4), cut(FILTERS, mesh, *[None] * 4)]

    def sums(x: Any, filters: Any) -> Any:
        y = dtensor.relayout(tf.nn.conv2d(x, filters, 1, "SAME"), layout)
        return tf.reduce_sum(tf.sin(y), [0, 1, 2])

    found, program = run(mesh, sums, *parts, channels=True)
    expected = np.sin(tf.nn.conv2d(X, FILTERS, 1, "SAME")).sum((0, 1, 2))
    np.testing.assert_allclose(whole(found), expected, rtol=1e-11)
    assert [island.title for island in program.islands] == ["Conv2D (Conv2D)"]


def test_what_cannot_be_put_back_in_the_last_attempt_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expansion, "MOST_ATTEMPTS", 1)
    mesh, _ = inner_mesh(model=2)
    parts = [cut(X, mesh, None, "model", None, None), cut(FILTERS, mesh, *[None] * 4)]
    with pytest.raises(CannotCut, match="Conv2D: its operands are laid out in another way"):
        run(mesh, valid, *parts, channels=True)


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("how", ["filters", "channels"])
def test_those_of_layers_that_are_not_known_to_convolve(name: str, how: str) -> None:
    """Nobody said that channels are cut: it is seen in what DTensor makes, or refuses to."""
    function, x, filters = FUNCTIONS[name]
    by_channel = name == "depthwise"
    taken, given = ("model", None) if by_channel else CUTS[how][1:]
    mesh, _ = inner_mesh(model=2)
    window = (None,) * (x.ndim - 2)
    parts = [
        cut(x, mesh, None, *window, None if by_channel and how == "filters" else taken),
        cut(filters, mesh, *window, None if by_channel and how == "channels" else taken, given),
    ]
    expected = with_gradients(function)(tf.constant(x), tf.constant(filters))
    found, program = run(mesh, with_gradients(function), *parts)
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)
    if not by_channel:
        assert program.islands == ()


def test_what_has_no_stand_in_is_an_island_where_devices_have_parts() -> None:
    """Two filters for each channel."""
    mesh, _ = inner_mesh(model=2)
    filters = RNG.normal(size=(3, 2, 8, 2))
    parts = [cut(X, mesh, *[None] * 4), cut(filters, mesh, None, None, "model", None)]
    expected = with_gradients(each)(tf.constant(X), tf.constant(filters))
    found, program = run(mesh, with_gradients(each), *parts)
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)
    assert any("of parts of channels" in island.reason for island in program.islands)


@pytest.mark.parametrize("cuts", [(None, None, "model", None), (None, "model", None, None)])
def test_one_of_parts_inside_a_function_is_an_island(cuts: tuple[str | None, ...]) -> None:
    """DTensor looks at no filters of depthwise ones, and gives what is inside other names."""
    mesh, _ = inner_mesh(model=2)
    parts = [cut(X, mesh, *[None] * 4), cut(EACH, mesh, *cuts)]
    called = tf.function(each)
    found, program = run(mesh, with_gradients(called), *parts)
    expected = with_gradients(each)(tf.constant(X), tf.constant(EACH))
    for one, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-11, atol=1e-11)
    assert any("inside a function" in island.reason for island in program.islands)


def test_one_of_parts_of_the_window_is_an_island() -> None:
    """Parts of the window fit channels, and gave another result."""
    mesh, _ = inner_mesh(model=2)
    parts = [cut(X, mesh, *[None] * 4), cut(EACH, mesh, None, "model", None, None)]
    found, program = run(mesh, each, *parts)
    np.testing.assert_allclose(whole(found), each(X, EACH), rtol=1e-11)
    assert program.islands
