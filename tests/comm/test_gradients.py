"""Gradients of collectives against those of the same mathematics on one device."""

from __future__ import annotations

import kdist
from kdist import comm
from kdist.comm.algorithms import ALGORITHMS, OPERATIONS

import numpy as np
import pytest
import tensorflow as tf

from .one_device import loss_of, plain

P = 4


def gradients(operation, xs, call, traced=False, **options):
    def program(*xs):
        with tf.GradientTape() as tape:
            for x in xs:
                tape.watch(x)
            loss = loss_of(call(operation, list(xs), **options))
        return tape.gradient(loss, xs, unconnected_gradients="zero")

    return (tf.function(program, autograph=False) if traced else program)(*xs)


def ours(operation, xs, **options):
    return getattr(comm, operation)(xs, kdist.mesh(data=P), "data", **options)


def check(operation, traced=False, zero=False, **options):
    random = np.random.default_rng(1)
    xs = [tf.constant(random.normal(size=(4, 3))) for _ in range(P)]
    if zero:
        xs[1] = tf.zeros_like(xs[1])
    algorithm = options.pop("algorithm", "auto")
    want = gradients(operation, xs, plain, **options)
    got = gradients(operation, xs, ours, traced, algorithm=algorithm, **options)
    for w, g in zip(want, got):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_equal_one_device(operation, algorithm):
    check(operation, algorithm=algorithm)


def test_gradients_over_a_torus():
    check("all_reduce", algorithm="torus:2x2", reduction="mean")
    check("all_reduce", algorithm="torus", traced=True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_in_a_function(operation):
    check(operation, traced=True, algorithm="halving")


@pytest.mark.parametrize("reduction", ["mean", "max", "min", "product"])
@pytest.mark.parametrize("operation", ["reduce", "all_reduce", "reduce_scatter", "scan"])
def test_gradients_of_other_reductions(operation, reduction):
    if (operation, reduction) != ("scan", "mean"):
        check(operation, reduction=reduction)
        check(operation, reduction=reduction, zero=True)
        check(operation, reduction=reduction, traced=True)


@pytest.mark.parametrize("operation", ["broadcast", "reduce", "gather", "scatter"])
def test_gradients_with_another_root(operation):
    check(operation, root=2)
    if operation == "reduce":
        check(operation, root=2, reduction="max")


def test_gradients_of_an_exclusive_scan():
    check("scan", exclusive=True)
    check("scan", exclusive=True, reduction="product")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tape_around_a_function(operation):
    """TensorFlow then goes back through the graph of the function, node by node."""
    mesh = kdist.mesh(data=P)

    @tf.function(autograph=False)
    def program(*xs):
        found = getattr(comm, operation)(list(xs), mesh, "data", algorithm="ring")
        return [x for x in found if x is not None]

    def call(operation, xs):
        found = iter(program(*xs))
        return [next(found) if p is not None else None for p in plain(operation, xs)]

    xs = [tf.constant(np.random.default_rng(2).normal(size=(4, 3))) for _ in range(P)]
    for w, g in zip(gradients(operation, xs, plain), gradients(operation, xs, call)):
        np.testing.assert_allclose(g, w, rtol=1e-9)


def test_gradients_of_send_recv():
    xs = [tf.constant([float(r + 1)], tf.float64) for r in range(P)]
    pairs = [(0, 1), (1, 2), (3, 0)]

    def call(operation, xs):
        return comm.send_recv(xs, kdist.mesh(data=P), "data", pairs=pairs)

    def same(operation, xs):
        return [xs[3], xs[0], xs[1], xs[3]]

    for w, g in zip(gradients("send_recv", xs, same), gradients("send_recv", xs, call)):
        np.testing.assert_allclose(g, w, rtol=1e-9)


def test_gradients_of_gradients():
    xs = [tf.constant(np.random.default_rng(3).normal(size=(2,))) for _ in range(P)]

    def second(call):
        with tf.GradientTape() as outer:
            outer.watch(xs)
            with tf.GradientTape() as inner:
                inner.watch(xs)
                loss = tf.add_n([tf.reduce_sum(y**3) for y in call(xs)])
            first = inner.gradient(loss, xs)
            norm = tf.add_n([tf.reduce_sum(g**2) for g in first])
        return outer.gradient(norm, xs)

    mesh = kdist.mesh(data=P)
    got = second(lambda xs: comm.all_reduce(xs, mesh, "data", algorithm="ring"))
    for w, g in zip(second(lambda xs: [tf.add_n(xs)] * P), got):
        np.testing.assert_allclose(g, w, rtol=1e-9)


def test_uneven_parts_go_back_where_they_came_from():
    sizes = [[1, 0, 2], [3, 1, 0], [0, 2, 1]]
    xs = [tf.constant(np.arange(float(sum(row)))) for row in sizes]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        got = comm.all_to_all(xs, kdist.mesh(data=3), "data", sizes=sizes)
        loss = tf.add_n([tf.reduce_sum(y**2) * (r + 1) for r, y in enumerate(got)])
    for row, x, g in zip(sizes, xs, tape.gradient(loss, xs)):
        np.testing.assert_allclose(g, 2 * x * np.repeat([1, 2, 3], row))
    values = [tf.constant(np.arange(float(n))) for n in (2, 0, 3)]
    for function in (comm.gather, comm.all_gather):
        with tf.GradientTape() as tape:
            tape.watch(values)
            got = [y for y in function(values, kdist.mesh(data=3), "data") if y is not None]
            loss = tf.add_n([tf.reduce_sum(y**2) for y in got])
        for x, g in zip(values, tape.gradient(loss, values)):
            np.testing.assert_allclose(g, 2 * x * len(got))


def in_two_groups(function, lengths, traced, **options):
    """Gradients over two groups of two, by one call and by a call of each group."""
    random = np.random.default_rng(4)
    xs = [tf.constant(random.normal(size=n)) for n in lengths]
    both = kdist.mesh(data=2, model=2)

    def together(*xs):
        return function(list(xs), both, "data", **options)

    def apart(*xs):
        found = {}
        for row in ((0, 2), (1, 3)):
            mesh = kdist.mesh(data=2, devices=[f"cpu:{k}" for k in row])
            found.update(zip(row, function([xs[k] for k in row], mesh, "data", **options)))
        return [found[k] for k in range(4)]

    def gradients(call):
        def program(*xs):
            with tf.GradientTape() as outer:
                outer.watch(xs)
                with tf.GradientTape() as tape:
                    tape.watch(xs)
                    loss = tf.add_n([tf.reduce_sum(y**3) for y in call(*xs) if y is not None])
                first = tape.gradient(loss, xs)
                norm = tf.add_n([tf.reduce_sum(one**2) for one in first])
            return first, outer.gradient(norm, xs)

        return tf.nest.flatten((tf.function(program, autograph=False) if traced else program)(*xs))

    return xs, gradients(together), gradients(apart)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("function", "lengths", "options"),
    [
        (comm.gather, [1, 2, 3, 2], {}),
        (comm.all_gather, [1, 2, 3, 2], {}),
        (comm.all_to_all, [4, 2, 6, 5], {}),
        (comm.all_to_all, [(2, 1), (2, 2), (2, 3), (2, 2)], {"cut_dim": 0, "join_dim": 1}),
        (comm.all_to_all, [(3, 1), (2, 2), (3, 3), (2, 2)], {"cut_dim": 0, "join_dim": 1}),
    ],
)
def test_groups_may_have_lengths_of_their_own(function, lengths, options, traced):
    xs, got, want = in_two_groups(function, lengths, traced, **options)
    for x, g, w in zip([*xs, *xs], got, want, strict=True):
        assert g.shape == x.shape
        np.testing.assert_allclose(g, w, rtol=1e-9)


def test_integers_have_no_gradient():
    xs = [tf.constant([1]), tf.constant([2])]
    with tf.GradientTape() as tape:
        tape.watch(tf.constant(1.0))
        got = comm.all_reduce(xs, kdist.mesh(data=2), "data")
    assert tape.gradient(got, xs) == [None, None]
