"""Programs of all devices in one graph: their collectives, loops, places, and lifetime."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from kdist._compat import dtensor_internals
from kdist.dtensor.collectives import COLLECTIVES, CannotStitch
from kdist.dtensor.stitching import Stitcher
from kdist.graphs import executed

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from .dtensor_parts import cut, inner_mesh, lowered_program, run, specs, whole

X = np.random.default_rng(0).normal(size=(8, 8))


def devices(count: int) -> list[str]:
    return [f"/device:CPU:{k}" for k in range(count)]


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 1, "c": 4}], ids=str)
@pytest.mark.parametrize(
    "function",
    [tf.reduce_sum, tf.reduce_max, tf.reduce_min, tf.reduce_mean, tf.reduce_prod],
    ids=lambda f: f.__name__,
)
def test_reductions(axes: dict[str, int], function: Callable) -> None:
    mesh, _ = inner_mesh(**axes)
    names = list(axes)
    for dims in ((names[0], None), (None, names[-1]), (names[0], names[-1])):
        if len(set(dims)) < 2:
            continue
        for dim in (0, 1, None):
            result, program = run(mesh, lambda x, d=dim: function(x, d), cut(X, mesh, *dims))
            np.testing.assert_allclose(whole(result), function(X, dim), rtol=1e-12)
            over = {axis for i, axis in enumerate(dims) if axis and dim in (i, None)}
            assert {a for c in program.collectives for a in c.axis} == over


@pytest.mark.parametrize("function", [tf.reduce_all, tf.reduce_any], ids=lambda f: f.__name__)
def test_reductions_of_conditions(function: Callable) -> None:
    mesh, _ = inner_mesh(a=2, b=2)
    for dim in (0, 1, None):
        for bound in (-9.0, 0.0, 9.0):
            result, _ = run(
                mesh, lambda x, d=dim, b=bound: function(x > b, d), cut(X, mesh, "a", "b")
            )
            np.testing.assert_array_equal(whole(result), function(bound < X, dim))


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 4}], ids=str)
def test_relayouts(axes: dict[str, int]) -> None:
    """From each layout to each other: gathers along one and two dims, cuts, all-to-alls."""
    mesh, _ = inner_mesh(**axes)
    entries = [None, *axes]
    layouts = [(a, b) for a in entries for b in entries if a is None or a != b]
    kinds = set()
    for source in layouts:
        for target in layouts:
            wanted = dtensor.Layout([axis or dtensor.UNSHARDED for axis in target], mesh)
            result, program = run(
                mesh, lambda x, w=wanted: dtensor.relayout(x, w), cut(X, mesh, *source)
            )
            assert specs(result) == target
            for part, right in zip(result.parts, cut(X, mesh, *target).parts, strict=True):
                np.testing.assert_array_equal(part, right)
            kinds |= {one.kind for one in program.collectives}
    assert {"all-gather", "all-to-all"} <= kinds


def test_products_and_their_gradients() -> None:
    mesh, _ = inner_mesh(a=2, b=2)
    up, down = np.split(np.random.default_rng(1).normal(size=(16, 8)), 2)

    def function(x: Any, up: Any, down: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, up, down])
            loss = tf.reduce_sum(tf.tanh(x @ up) @ down)
        return loss, tape.gradient(loss, [x, up, down])

    given = [cut(X, mesh, "b", None), cut(up, mesh, None, "a"), cut(down, mesh, "a", None)]
    found, program = run(mesh, function, *given)
    expected = function(*map(tf.constant, (X, up, down)))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(whole(one), other, atol=1e-12)
    assert program.collectives


def test_each_device_computes_its_part() -> None:
    mesh, _ = inner_mesh(model=4)
    given = [cut(X, mesh, None, None), cut(X, mesh, None, "model")]
    stitched = Stitcher(lowered_program(mesh, tf.matmul, *given)).stitch(devices(4))

    @tf.function(autograph=False)
    def step() -> Any:
        return stitched([[t.parts[k] for t in given] for k in range(4)])[1]

    (function,) = [f for f in executed.watch(step) if f.select(executed.PRODUCTS)]
    assert function.count(executed.PRODUCTS) == dict.fromkeys(devices(4), 1)
    assert {n.shape for n in function.select(executed.PRODUCTS)} <= {(8, 2), None}


@pytest.mark.parametrize("turns", [(), (1, 0, 3), (2, 2, 2)], ids=str)
def test_members_take_turns(turns: tuple[int, ...]) -> None:
    """As they come, or as is said."""
    mesh, _ = inner_mesh(model=4)
    given = [cut(X, mesh, None, "model")]
    stitcher = Stitcher(
        lowered_program(mesh, lambda x: [tf.reduce_sum(x * k) for k in (2, 3, 4)], *given)
    )
    sums = [n for n in stitcher.live if stitcher.nodes[n].op in COLLECTIVES]
    stitcher.turns = dict(zip(sums, turns))
    stitched = stitcher.stitch(devices(4))

    @tf.function(autograph=False)
    def step() -> Any:
        return stitched([[t.parts[k] for t in given] for k in range(4)])[1]

    (function,) = [f for f in executed.watch(step) if f.select("AddN")]
    made = {n.name.rpartition("/group0")[0]: n.device for n in function.select("AddN")}
    wanted = dict(zip(sums, turns or range(3), strict=True))
    assert {name.removeprefix("PartitionedCall/"): d for name, d in made.items()} == {
        name: f"/device:CPU:{turn}" for name, turn in wanted.items()
    }


def test_loops_and_branches_in_several_shapes() -> None:
    """DTensor names the bodies of all programs alike; here each program keeps its own."""
    mesh, _ = inner_mesh(model=2)
    for rows in (8, 4, 2):
        found, _ = run(mesh, lambda x: tf.sin(x), cut(X[:rows], mesh, "model", None))
        np.testing.assert_allclose(whole(found), np.sin(X[:rows]))
        forward = lambda x: tf.while_loop(  # noqa: E731
            lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y) * y), (0, x)
        )[1]
        found, _ = run(mesh, forward, cut(X[:rows], mesh, None, None))
        np.testing.assert_allclose(whole(found), forward(tf.constant(X[:rows])), rtol=1e-12)


def test_collectives_in_a_loop_are_refused() -> None:
    mesh, _ = inner_mesh(model=2)

    def loop(x: Any, y: Any) -> Any:
        body = lambda i, total: (i + 1, total + tf.reduce_sum(x @ y))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 3, body, (0, tf.constant(0.0, tf.float64)))[1]

    given = [cut(X, mesh, None, "model"), cut(X, mesh, "model", None)]
    program = lowered_program(mesh, loop, *given, islands=False)
    assert program.bodies and program.collectives
    with pytest.raises(CannotStitch, match="in the body of a loop or branch"):
        Stitcher(program)


def test_what_prints_and_checks_does_so(capfd: pytest.CaptureFixture[str]) -> None:
    """No result needs it, and it runs: a print on the first device alone."""
    mesh, _ = inner_mesh(model=2)

    def function(x: Any, most: float) -> Any:
        tf.print("the sum is", tf.reduce_sum(x))
        tf.debugging.assert_less(tf.reduce_max(x), tf.constant(most, tf.float64))
        return x + 1.0

    x = cut(np.ones((4, 2)), mesh, "model", None)
    result, _ = run(mesh, lambda x: function(x, 2.0), x)
    np.testing.assert_array_equal(whole(result), np.full((4, 2), 2.0))
    assert capfd.readouterr().err.count("the sum is 8") == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="assert"):
        run(mesh, lambda x: function(x, 0.5), x)


def test_functions_are_forgotten_with_those_who_call_them() -> None:
    def names() -> set[str]:
        found = context.context().list_function_names()
        return {n for n in map(str, found) if "kdist_stitched" in n}

    before = names()
    mesh, _ = inner_mesh(model=2)
    run(mesh, tf.sin, cut(X, mesh, "model", None))
    gc.collect()
    assert names() <= before


def test_a_graph_keeps_the_functions_that_it_calls() -> None:
    mesh, _ = inner_mesh(model=2)
    x = cut(X, mesh, "model", None)

    def traced() -> Any:
        stitched = Stitcher(lowered_program(mesh, tf.sin, x)).stitch(devices(2))
        step = tf.function(lambda: stitched([[p] for p in x.parts])[1], autograph=False)
        return step.get_concrete_function()

    concrete = traced()
    gc.collect()
    np.testing.assert_allclose(np.concatenate([p[0] for p in concrete()]), np.sin(X))


def test_the_private_names_exist() -> None:
    """What `Registered` and `tag` use; each of them moved would be seen here by name."""
    for name in ("add_function_def", "remove_function", "has_function", "list_function_names"):
        assert hasattr(context.context(), name), name
    assert hasattr(tf.Operation, "_set_attr")
    assert dtensor_internals.has_effects("PrintV2") and not dtensor_internals.has_effects("AddV2")
    assert dtensor_internals.Registered.__doc__
