"""Einsums whose operands are cut crosswise are not added up for each device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from .dtensor_parts import cut, inner_mesh, run, whole

SIZE = 4
EQUATIONS = ("ab,ab->", "ab,bc->c", "ab,bc->ac", "abc,abd->cd", "abc,abd->acd", "abc,chd->abhd")
CROSSED = {"ab,ab->", "ab,bc->c", "abc,abd->cd"}
"""Of those, which sum over two labels."""


def layouts(rank: int, axis: str) -> list[tuple[str | None, ...]]:
    """Nothing cut, and each dim."""
    return [tuple(axis if n == at else None for n in range(rank)) for at in (None, *range(rank))]


def einsum(equation: str, computed: bool) -> Any:
    if computed:
        return lambda x, y: tf.einsum(equation, tf.sin(x), tf.cos(y))
    return lambda x, y: tf.einsum(equation, x, y)


def of(equation: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=[SIZE] * len(one)) for one in equation.partition("->")[0].split(",")]


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_however_operands_are_cut(equation: str, computed: bool) -> None:
    mesh, _ = inner_mesh(model=2)
    x, y = of(equation)
    function = einsum(equation, computed)
    expected = function(tf.constant(x), tf.constant(y))
    for first, second in itertools.product(layouts(x.ndim, "model"), layouts(y.ndim, "model")):
        found, program = run(mesh, function, cut(x, mesh, *first), cut(y, mesh, *second))
        message = f"{first} {second}"
        np.testing.assert_allclose(whole(found), expected, rtol=1e-11, err_msg=message)
        assert program.islands == ()


def test_another_axis_may_be_there() -> None:
    """DTensor gathers by sums then, over the axis, of what each device writes into zeros."""
    mesh, _ = inner_mesh(model=2, expert=2)
    x, y = of("ab,bc->c")
    function = einsum("ab,bc->c", computed=False)
    expected = function(tf.constant(x), tf.constant(y))
    for axis in ("model", "expert"):
        for first, second in itertools.product(layouts(x.ndim, axis), layouts(y.ndim, axis)):
            found, _ = run(mesh, function, cut(x, mesh, *first), cut(y, mesh, *second))
            message = f"{first} {second}"
            np.testing.assert_allclose(whole(found), expected, rtol=1e-11, err_msg=message)


@pytest.mark.parametrize("equation", sorted(CROSSED & {"ab,ab->", "abc,abd->cd"}))
def test_over_two_axes(equation: str) -> None:
    mesh, _ = inner_mesh(model=2, expert=2)
    x, y = of(equation)
    rest = (None,) * (x.ndim - 2)
    function = einsum(equation, computed=True)
    expected = function(tf.constant(x), tf.constant(y))
    given = cut(x, mesh, "model", "expert", *rest)
    for place in (("expert", "model"), ("model", "expert"), ("expert", None), (None, "model")):
        found, _ = run(mesh, function, given, cut(y, mesh, *place, *rest))
        np.testing.assert_allclose(whole(found), expected, rtol=1e-11, err_msg=str(place))


def test_the_smaller_operand_is_made_whole() -> None:
    mesh, _ = inner_mesh(model=2)
    x, y = np.ones((SIZE, SIZE, 8)), np.ones((SIZE, SIZE, 2))
    function = einsum("abc,abd->cd", computed=True)
    for one, other, equal in ((x, y, "cd"), (y, x, "dc")):
        function = einsum(f"ab{equal[0]},ab{equal[1]}->{equal}", computed=True)
        given = cut(one, mesh, "model", None, None), cut(other, mesh, None, "model", None)
        _, program = run(mesh, function, *given)
        gathers = [c.bytes for c in program.collectives if c.kind == "all-gather"]
        assert gathers == [y.nbytes]
