"""Operations that DTensor cannot expand: whole on every device, in a program that stays cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.dtensor import expansion
from kdist.dtensor.body import Body
from kdist.dtensor.expansion import expand
from kdist.dtensor.flops import graph_flops
from kdist.dtensor.islands import CannotCut, with_neighbours
from kdist.dtensor.lowered_program import Island, LoweredProgram
from kdist.dtensor.stitching import Stitcher
from kdist.graphs import executed

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from .dtensor_parts import cut, inner_mesh, lowered_program, run, specs, whole

X = np.random.default_rng(0).normal(size=(4, 8))
WEIGHTS = np.random.default_rng(1).normal(size=(8, 8))
HIDDEN = X.nbytes
"""Bytes of what goes into each island below: the output of a product, cut by columns."""


def python(x: Any) -> Any:
    return x + tf.ensure_shape(tf.numpy_function(np.sin, [x], x.dtype), x.shape)


def grouped(x: Any) -> Any:
    return ops.conv(tf.reshape(x, (4, 2, 4)), tf.ones((2, 2, 4), x.dtype), padding="same")


# The first operation of the island, what it is, and whether DTensor is tried before it is found.
ISLANDS: dict[str, tuple[Callable, str]] = {
    "computing branches": (
        lambda x: ops.cond(ops.sum(x) > 0, lambda: ops.sin(x) * x, lambda: x * x * x),
        "StatelessIf",
    ),
    "switch": (
        lambda x: ops.switch(ops.cast(ops.sum(x) > 0, "int32"), [ops.sin, lambda a: a * a], x),
        "StatelessCase",
    ),
    "scan": (
        lambda x: ops.scan(lambda c, e: (c + e, c * e), ops.zeros_like(x[0]), x)[1],
        "StatelessWhile",
    ),
    "map": (lambda x: ops.map(lambda e: e * e, x), "StatelessWhile"),
    "a loop that would communicate": (
        lambda x: ops.fori_loop(0, 3, lambda i, a: ops.tanh(a * ops.sum(a)), x),
        "StatelessWhile",
    ),
    "argsort": (lambda x: x * ops.cast(ops.argsort(x, -1), x.dtype), "TopKV2"),
    "grouped convolution": (grouped, "PartitionedCall"),
    "python": (python, "PyFunc"),
    "split": (lambda x: ops.concatenate(ops.split(x, 2, -1)[::-1], -1), "Split"),
    "backwards": (lambda x: x[:, ::-1], "StridedSlice"),
    "inverse": (
        lambda x: tf.linalg.inv(tf.matmul(x, x, transpose_a=True) + tf.eye(8, dtype=x.dtype)),
        "MatMul",
    ),
}


def step(operation: Callable) -> Callable:
    """Gradients of a product, an operation on it, and another product."""

    def function(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = operation(tf.tanh(x @ w))
            loss = tf.reduce_sum(y * tf.sin(y + 1.0))
        return loss, tape.gradient(loss, [x, w])

    return function


@pytest.mark.parametrize("name", ISLANDS)
def test_an_island_runs_whole_and_all_else_stays_cut(name: str) -> None:
    operation, kind = ISLANDS[name]
    mesh, _ = inner_mesh(model=2)
    function = step(operation)
    given = [cut(X, mesh, None, None), cut(WEIGHTS, mesh, None, "model")]
    found, program = run(mesh, function, *given)
    expected = tf.nest.flatten(function(tf.constant(X), tf.constant(WEIGHTS)))
    for one, reference in zip(tf.nest.flatten(found), expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-9, atol=1e-12)
    assert specs(found[1][1]) == (None, "model")  # the weight's gradient
    assert kind in [island.operations[0][0] for island in program.islands]
    # What goes into it is gathered, once, and nothing else is.
    gathered = [one.bytes for one in program.collectives if one.kind == "all-gather"]
    assert gathered == [HIDDEN]
    assert max(island.bytes for island in program.islands) == HIDDEN
    # The products around it are of parts.
    parts = [n for n in program.definition.node_def if n.op == "MatMul" and "island/" not in n.name]
    assert len([n for n in parts if "matmul" in n.name]) == 3
    assert {tuple(map(int, _local(program, n))) for n in parts} >= {(4, 4), (8, 4)}


def test_equal_layers_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names no operation is looked for by halving: about log2 of them lowerings."""
    lowered: list[int] = []
    own = expansion.lower
    monkeypatch.setattr(expansion, "lower", lambda *a: (lowered.append(1), own(*a))[1])

    def lowerings(layers: int) -> int:
        def function(x: Any, w: Any) -> Any:
            for _ in range(layers):
                x = ISLANDS["inverse"][0](tf.tanh(x @ w))
            return x

        lowered.clear()
        mesh, _ = inner_mesh(model=2)
        given = [cut(WEIGHTS, mesh, None, axis) for axis in (None, "model")]
        found, _ = run(mesh, function, *given)
        expected = function(tf.constant(WEIGHTS), tf.constant(WEIGHTS))
        np.testing.assert_allclose(whole(found), expected, rtol=1e-9, atol=1e-12)
        return len(lowered)

    few, many = lowerings(2), lowerings(6)
    assert few > 3 and many <= few + 3


def test_an_operation_without_a_rule_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its shapes: each would take a lowering of its own, of which there are few."""
    lowered: list[int] = []
    own = expansion.lower
    monkeypatch.setattr(expansion, "lower", lambda *a: (lowered.append(1), own(*a))[1])

    def function(x: Any) -> Any:
        for size in (1, 2, 3):
            x = ops.slice_update(tf.sin(x), (0, size), tf.ones((4, size), x.dtype))
        return x

    mesh, _ = inner_mesh(model=2)
    found, program = run(mesh, function, cut(X, mesh, None, "model"))
    np.testing.assert_allclose(whole(found), function(tf.constant(X)), rtol=1e-12)
    kinds = [kind for one in program.islands for kind, _ in one.operations]
    assert kinds.count("XlaDynamicUpdateSlice") == 3 and len(lowered) == 2


def test_an_operation_whose_type_is_a_function() -> None:
    """As TensorFlow 1 called functions, and `ctc_loss`, which computes in float32, still does."""

    def operation(x: Any) -> Any:
        labels, counts = tf.ones((4, 1), "int32"), (tf.fill([4], 1), tf.fill([4], 2))
        return x + ops.ctc_loss(labels, tf.reshape(x, (4, 2, 4)), *counts)[:, None]

    mesh, _ = inner_mesh(model=2)
    function = step(operation)
    given = [cut(X, mesh, None, None), cut(WEIGHTS, mesh, None, "model")]
    found, program = run(mesh, function, *given)
    expected = tf.nest.flatten(function(tf.constant(X), tf.constant(WEIGHTS)))
    for one, reference in zip(tf.nest.flatten(found), expected, strict=True):
        np.testing.assert_allclose(whole(one), reference, rtol=1e-5, atol=1e-6)
    assert "While" in [kind for island in program.islands for kind, _ in island.operations]


def _local(program: LoweredProgram, node: Any) -> Any:
    return [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim]


def stitched(program: LoweredProgram, given: Any) -> Callable:
    call = Stitcher(program).stitch([f"/device:CPU:{k}" for k in range(program.size)])
    parts = [[t.parts[k] for t in given] for k in range(program.size)]
    return tf.function(lambda: call(parts)[1], autograph=False)


def test_gradients_of_broadcasts_are_no_island() -> None:
    mesh, _ = inner_mesh(model=2)

    def loss_and_gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            centred = x - tf.reduce_mean(x, -1, keepdims=True)
            loss = tf.reduce_sum(tf.nn.softmax(centred / tf.math.reduce_std(x, -1, keepdims=True)))
        return loss, tape.gradient(loss, x)

    def traced(x: Any) -> Any:
        return tf.function(loss_and_gradient, autograph=False)(x)

    program = lowered_program(mesh, traced, cut(X, mesh, None, "model"))
    assert program.islands == ()
    assert lowered_program(mesh, loss_and_gradient, cut(X, mesh, "model", None)).islands == ()


def test_every_device_runs_it() -> None:
    mesh, _ = inner_mesh(model=2)
    x = cut(X, mesh, None, "model")
    program = lowered_program(mesh, lambda x: tf.reduce_sum(tf.argsort(x)) + 1, x)
    (ran,) = [f for f in executed.watch(stitched(program, [x])) if f.select("TopKV2")]
    assert ran.count("TopKV2") == {"/device:CPU:0": 1, "/device:CPU:1": 1}


def test_effects_happen_once_and_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    mesh, _ = inner_mesh(model=2)
    calls: list[float] = []

    def noted(x: np.ndarray) -> np.ndarray:
        calls.append(float(x.sum()))
        return x * 2.0

    def function(x: Any) -> Any:
        tf.print("before")
        y = tf.ensure_shape(tf.numpy_function(noted, [x], x.dtype), x.shape)
        tf.print("after")
        return y + x

    x = cut(X, mesh, None, "model")
    program = lowered_program(mesh, function, x)
    assert {kind for i in program.islands for kind, _ in i.operations} >= {"PyFunc", "PrintV2"}
    (ran,) = [f for f in executed.watch(stitched(program, [x])) if f.select("PyFunc")]
    assert ran.count("PyFunc") == {"/device:CPU:0": 1}
    np.testing.assert_allclose(calls, [X.sum()])
    assert capfd.readouterr().err.split() == ["before", "after"]


def test_what_cannot_be_parted_joins() -> None:
    def body_of(function: Callable, *given: Any) -> Body:
        traced = tf.function(function, autograph=False)
        return Body(traced.get_concrete_function(*given))

    spec = tf.TensorSpec((4, 8), tf.float64)
    listed = body_of(lambda x: tf.stack(tf.unstack(x)) + ops.map(lambda e: e * e, x), spec)
    loop = next(n for n, node in listed.nodes.items() if "While" in node.op)
    kinds = {listed.nodes[n].op for n in with_neighbours(listed, {loop: "why"})}
    assert {"TensorListFromTensor", "TensorListReserve", "TensorListStack"} <= kinds
    assert "Pack" not in kinds

    unknown = body_of(lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0)) + x, spec)
    where = next(n for n, node in unknown.nodes.items() if node.op == "Where")
    kinds = {unknown.nodes[n].op for n in with_neighbours(unknown, {where: "why"})}
    assert "GatherV2" in kinds and "AddV2" not in kinds  # up to where the size is known again

    handles = body_of(lambda x: tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[8]), spec)
    with pytest.raises(CannotCut, match="a list of tensors"):
        with_neighbours(handles, dict.fromkeys(handles.nodes, "why"))


def test_an_island_whose_result_leaves_its_function_is_no_island() -> None:
    mesh, _ = inner_mesh(model=2)
    traced = tf.function(
        lambda x: tf.boolean_mask(tf.sort(x), x[0] > 0, axis=1), autograph=False
    ).get_concrete_function(tf.TensorSpec((4, 8), tf.float64))
    with pytest.raises(CannotCut, match="that leaves its function"):
        expand(traced, mesh, [cut(X, mesh, None, "model").layout])


def test_the_share_that_is_not_divided() -> None:
    """A loop of three products of 4 x 8 x 8 in a program with three more of them."""
    mesh, _ = inner_mesh(model=2)

    def function(x: Any, w: Any) -> Any:
        looped = ops.fori_loop(0, 3, lambda i, a: ops.tanh(a @ w) * ops.sum(a), x @ w)
        return tf.reduce_sum((looped @ w) @ w)

    given = [cut(X, mesh, None, None), cut(WEIGHTS, mesh, None, "model")]
    program = lowered_program(mesh, function, *given)
    (island,) = program.islands
    one = 2 * 4 * 8 * 8
    assert (island.flops, island.share) == (3 * one, 0.5)
    assert "50% of the step's FLOPs not divided" in str(island)
    assert "StatelessWhile" in island.title


COUNTED: dict[str, tuple[Callable, int]] = {
    "matmul": (lambda x: tf.matmul(x, x, transpose_a=True), 2 * 8 * 8 * 4),
    "batched": (lambda x: tf.matmul(x[None], x[None], transpose_b=True), 2 * 4 * 4 * 8),
    "einsum": (lambda x: tf.einsum("ab,cb->ac", x, x), 2 * 4 * 4 * 8),
    "einsum of the rest": (lambda x: tf.einsum("...b,cb->...c", x, x), 2 * 4 * 4 * 8),
    "convolution": (
        lambda x: tf.nn.conv1d(x[None], tf.ones((3, 8, 5), x.dtype), 1, "SAME"),
        2 * 4 * 5 * 3 * 8,
    ),
    "branches": (
        lambda x: tf.cond(x[0, 0] > 0, lambda: x @ tf.transpose(x), lambda: x[:, :4]),
        256,
    ),
    "elements": (tf.sin, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_counted(name: str) -> None:
    function, expected = COUNTED[name]
    traced = tf.function(function, autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec((4, 8), tf.float64)).graph
    assert graph_flops(graph) == expected


def test_a_recurrent_layer_counts_its_steps() -> None:
    layer = keras.layers.SimpleRNN(4)
    layer.build((2, 5, 8))
    variables = layer.trainable_variables

    def function(x: Any, params: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(params)
            with keras.StatelessScope(list(zip(variables, params, strict=True))):
                loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, params)

    traced = tf.function(function, autograph=False)
    params = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    graph = traced.get_concrete_function(tf.TensorSpec((2, 5, 8)), params).graph
    forward = 5 * 2 * 2 * (8 * 4 + 4 * 4)
    assert 2 * forward <= graph_flops(graph) <= 3 * forward


@pytest.mark.parametrize("reason", ["Conv2D compiled by XLA", "Conv2D: no rule for it"])
def test_a_call_is_named_by_what_is_inside(reason: str) -> None:
    island = Island((("StatefulPartitionedCall", "call"),), reason, "net/groups", 8, 1.0, 0.5)
    assert island.title == f"{reason.partition(':')[0]} in layer 'net/groups'"
