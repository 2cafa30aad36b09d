"""What travels, read from the graphs that TensorFlow executed: exactly the schedule's messages."""

from __future__ import annotations

from collections import Counter

import kdist
from kdist import comm
from kdist.comm import torus
from kdist.comm.algorithms import ALGORITHMS, OPERATIONS, schedule
from kdist.graphs import executed
from kdist.sharding.mesh import Device

import pytest
import tensorflow as tf

BLOCK = 12  # divides by every size here, so that all pieces are equal


def watched(p: int, call, blocks_of=None):
    """Runs a collective between variables of the devices; returns its sends.

    Returns:
        Counter of (source, target, bytes).
    """
    mesh, variables, results = kdist.mesh(data=p), [], []
    for rank in range(p):
        with tf.device(f"CPU:{rank}"):
            variables.append(tf.Variable(tf.fill((p * BLOCK,), float(rank + 1))))
            results.append(tf.Variable(tf.zeros(()), shape=tf.TensorShape(None)))

    @tf.function(autograph=False)
    def program():
        given = []
        for rank in range(p):
            with tf.device(f"CPU:{rank}"):
                value = variables[rank].read_value()
                given.append(value[: blocks_of(rank)] if blocks_of else value)
        for rank, result in enumerate(call(given, mesh)):
            if result is not None:
                with tf.device(f"CPU:{rank}"):
                    results[rank].assign(result)

    found = executed.largest(executed.watch(program))
    number = {f"/device:CPU:{rank}": rank for rank in range(p)}
    return found, Counter(
        (number[Device.parse(t.source).name], number[Device.parse(t.target).name], t.nbytes)
        for t in found.transfers
        if not t.control
    )


def messages(operation: str, algorithm: str, p: int) -> Counter:
    """The schedule's messages, in the bytes of `watched`."""
    plan = schedule(operation, algorithm, p)
    chunk = p * BLOCK * 4
    if operation in ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"):
        chunk //= p
    chunk //= plan.pieces
    return Counter((m.source, m.target, len(m.chunks) * chunk) for m in plan.messages)


def run(operation: str, algorithm: str, p: int):
    blocks_of = (lambda rank: BLOCK) if operation in ("gather", "all_gather") else None
    return watched(
        p,
        lambda given, mesh: getattr(comm, operation)(given, mesh, "data", algorithm=algorithm),
        blocks_of,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_exactly_the_messages_travel(operation, algorithm):
    for p in (4,) if algorithm == "hypercube" else (3, 4):
        _, sent = run(operation, algorithm, p)
        assert sent == messages(operation, algorithm, p)


@pytest.mark.parametrize("algorithm", ["ring", "halving", "hypercube"])
def test_exactly_the_messages_travel_among_eight(algorithm):
    _, sent = run("all_reduce", algorithm, 8)
    assert sent == messages("all_reduce", algorithm, 8)


@pytest.mark.parametrize(("algorithm", "p"), [("torus", 4), ("torus:2x3", 6), ("torus:3x2", 6)])
def test_exactly_the_messages_travel_on_a_torus(algorithm, p):
    found, sent = run("all_reduce", algorithm, p)
    assert sent == messages("all_reduce", algorithm, p)
    a, b = torus.sides(algorithm, p)
    adds = found.count(r"\w*Add(N|V2)?")  # of b pieces in each round along a row; then of three
    assert set(adds.values()) == {b * (a - 1)}


def test_each_device_of_a_ring_adds():
    found, _ = run("all_reduce", "ring", 4)
    adds = found.count(r"\w*Add(N|V2)?")
    assert adds == {f"/device:CPU:{rank}": 3 for rank in range(4)}


def test_the_gradient_is_the_transposed_collective_by_the_same_algorithm():
    def call(given, mesh):
        with tf.GradientTape() as tape:
            for value in given:
                tape.watch(value)
            result = comm.reduce(given, mesh, "data", algorithm="ring")
        return tape.gradient(result[0], given, output_gradients=3.0 * given[0])

    _, sent = watched(4, call)
    # The forward result is not used, so only the backward pass is left.
    assert sent == messages("broadcast", "ring", 4)
