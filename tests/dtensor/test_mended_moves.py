"""All-to-alls from each dim to each other, and their gradients.

DTensor's own undo their transpositions by a wrong one, where both dims are beyond the first and the
rank is not just so: a tensor of heads, (batch, length, heads, width), came back mixed up.
"""

from __future__ import annotations

import itertools
from typing import Any

from kdist.dtensor.collectives import CannotStitch
from kdist.dtensor.lowered_program import LoweredProgram
from kdist.dtensor.mended_moves import mend

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, lowered_program, run, specs, whole

MOVES = [
    (rank, begin, end)
    for rank in (2, 3, 4, 5)
    for begin, end in itertools.permutations(range(rank), 2)
]


def dims(rank: int, **where: int) -> list[str | None]:
    """A layout: which dim each axis cuts."""
    by_dim = {dim: axis for axis, dim in where.items()}
    return [by_dim.get(i) for i in range(rank)]


def layout(mesh: Any, names: list[str | None]) -> dtensor.Layout:
    return dtensor.Layout([name or dtensor.UNSHARDED for name in names], mesh)


@pytest.mark.parametrize(("rank", "begin", "end"), MOVES)
@pytest.mark.parametrize(
    ("count", "sizes"), [(2, (2, 4, 6, 4, 2)), (4, (4, 8, 12, 8, 4)), (2, (4, 4, 8, 8, 4))]
)
def test_a_move(rank: int, begin: int, end: int, count: int, sizes: tuple[int, ...]) -> None:
    """Sizes differ, so that each mistake shows, or are alike, so that DTensor drops reshapes."""
    mesh, _ = inner_mesh(model=count)
    shape = sizes[:rank]
    value = np.random.default_rng(0).normal(size=shape)
    weights = np.random.default_rng(1).normal(size=shape)
    wanted = dims(rank, model=end)

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = dtensor.relayout(x, layout(mesh, wanted))
            z = tf.reduce_sum(y * dtensor.relayout(tf.constant(weights), layout(mesh, wanted)))
        gradient = tape.gradient(z, x)
        return y, dtensor.relayout(gradient, layout(mesh, dims(rank, model=begin)))

    (found, gradient), program = run(mesh, function, cut(value, mesh, *dims(rank, model=begin)))
    assert specs(found) == tuple(wanted)
    assert "all-to-all" in [one.kind for one in program.collectives]
    np.testing.assert_array_equal(whole(found), value)
    np.testing.assert_array_equal(whole(gradient), weights)


@pytest.mark.parametrize(("begin", "end"), itertools.permutations(range(3), 2))
@pytest.mark.parametrize("sizes", [(2, 4, 6), (4, 4, 8)])
def test_a_move_of_a_constant(begin: int, end: int, sizes: tuple[int, ...]) -> None:
    """DTensor cuts a constant of one value by itself, and turns it round while lowering."""
    mesh, _ = inner_mesh(model=2)
    value = np.random.default_rng(0).normal(size=sizes)

    def function(x: Any) -> Any:
        ones = dtensor.relayout(tf.ones(sizes, tf.float64), layout(mesh, dims(3, model=begin)))
        return x * dtensor.relayout(ones, layout(mesh, dims(3, model=end)))

    found, program = run(mesh, function, cut(value, mesh, *dims(3, model=end)))
    assert "all-to-all" in [one.kind for one in program.collectives]
    np.testing.assert_array_equal(whole(found), value)


def test_moves_of_two_axes_one_after_the_other() -> None:
    mesh, _ = inner_mesh(model=2, expert=2)
    value = np.random.default_rng(0).normal(size=(4, 8, 12, 16))

    def function(x: Any) -> Any:
        for model, expert in ((3, 1), (3, 2), (1, 2), (0, 3), (2, 3), (2, 1)):
            x = dtensor.relayout(x, layout(mesh, dims(4, model=model, expert=expert)))
        return x

    given = cut(value, mesh, *dims(4, model=2, expert=1))
    found, program = run(mesh, function, given)
    np.testing.assert_array_equal(whole(found), value)
    moves = [one for one in program.collectives if one.kind == "all-to-all"]
    assert len(moves) >= 5
    assert {one.axis for one in moves} == {("model",), ("expert",)}


def test_transpositions_of_the_users_stay() -> None:
    mesh, _ = inner_mesh(model=2)
    value = np.random.default_rng(0).normal(size=(2, 4, 6, 8))

    def function(x: Any) -> Any:
        x = tf.transpose(x, (0, 2, 1, 3))
        x = dtensor.relayout(x, layout(mesh, dims(4, model=1)))
        return tf.transpose(tf.reshape(x, (2, 6, 32)), (1, 0, 2))

    found, _ = run(mesh, function, cut(value, mesh, *dims(4, model=1)))
    np.testing.assert_array_equal(
        whole(found), value.transpose(0, 2, 1, 3).reshape(2, 6, 32).transpose(1, 0, 2)
    )


@pytest.mark.parametrize("wrong", [(0, 2, 1, 3), (1, 0, 2, 3), (3, 2, 1, 0)])
def test_what_has_another_form_is_refused(wrong: tuple[int, ...]) -> None:
    """An all-to-all that TensorFlow writes in another way is not taken on trust."""
    program = moved_by_two()
    (back,) = [n for n in program.definition.node_def if n.name.endswith("/order")]
    back.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.array(wrong, np.int32)))
    with pytest.raises(CannotStitch, match="all-to-all of a form that is not known"):
        mend(program.definition)


def test_what_is_right_stays() -> None:
    program = moved_by_two()
    before = program.definition.SerializeToString(deterministic=True)
    mend(program.definition)
    assert program.definition.SerializeToString(deterministic=True) == before


def moved_by_two() -> LoweredProgram:
    mesh, _ = inner_mesh(model=2)
    given = cut(np.zeros((2, 4, 6, 8)), mesh, *dims(4, model=1))
    return lowered_program(
        mesh, lambda x: dtensor.relayout(x, layout(mesh, dims(4, model=2))), given
    )
