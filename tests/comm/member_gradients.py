"""Scenarios of a process in which gradients go through collectives; see `member.py`."""

from __future__ import annotations

from kdist import comm

import numpy as np
import tensorflow as tf
from member_parts import OPERATIONS, mesh, own
from one_device import loss_of, part_of_loss, plain
from reference import values


def gradients_of_all(index: int, n: int, per_process: int = 1) -> int:
    """Of every operation, with every reduction, by two algorithms, eagerly and in a function."""
    p, tried = n * per_process, 0
    cases = [(name, {}) for name in OPERATIONS]
    cases += [(name, {"root": p - 1}) for name in ("broadcast", "reduce", "gather", "scatter")]
    cases += [("reduce", {"reduction": kind, "root": 1}) for kind in ("mean", "max", "product")]
    cases += [("scan", {"reduction": "product", "exclusive": True})]
    pairs = [(0, p - 1), (p - 1, 0)] if p == 2 else [(0, p - 1), (1, 0)]
    cases += [("send_recv", {"pairs": pairs}), ("send_recv", {"pairs": pairs[:1]})]
    for operation, options in cases:
        for algorithm in (None,) if operation == "send_recv" else ("ring", "auto"):
            for traced in (True, False):
                chosen = options if algorithm is None else {**options, "algorithm": algorithm}
                one_gradient(index, n, per_process, operation, traced, chosen)
                tried += 1
    return tried


def one_gradient(
    index: int, n: int, per_process: int, operation: str, traced: bool, options: dict
) -> None:
    """The gradient of one operation, with only those values that it needs, against one device."""
    p, line = n * per_process, mesh(n, per_process)
    arrays = [tf.constant(x) for x in values(p, (2 * p, 3), "float64", seed=p)]
    needs = range(p)
    if operation in ("broadcast", "scatter"):
        needs = [options.get("root", 0)]
    elif operation == "send_recv":
        needs = [source for source, _ in options["pairs"]]
    ranks = own(index, per_process, list(range(p)))
    held = [arrays[rank] for rank in ranks if rank in needs]
    spec = tf.TensorSpec(arrays[0].shape, tf.float64)

    def program(*held):
        feed = iter(held)
        given = [next(feed) if rank in needs else spec for rank in ranks]
        with comm.GradientTape() as tape:
            tape.watch(held)
            results = getattr(comm, operation)(given, line, "data", **options)
            parts = [part_of_loss(r, y) for r, y in zip(ranks, results) if y is not None]
            loss = tf.add_n(parts) if parts else None
        return tape.gradient(loss, list(held), unconnected_gradients="zero")

    got = (tf.function(program, autograph=False) if traced else program)(*held)
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        results = plain(operation, arrays, **options)
        # Who neither sends nor receives, and has no value, has no result.
        results = [
            y if r in needs or operation != "send_recv" or any(r == t for _, t in options["pairs"])
            else None
            for r, y in enumerate(results)
        ]  # fmt: skip
        loss = loss_of(results)
    want = tape.gradient(loss, arrays, unconnected_gradients="zero")
    for w, g in zip([want[rank] for rank in ranks if rank in needs], got, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12, err_msg=f"{operation} {options}")


def gradients_of_a_program(index: int, n: int, traced: bool = True) -> int:
    """Several collectives after each other, used in another order in each process."""
    line, root = mesh(n), n - 1
    arrays = [tf.constant(x) for x in values(n, (4,), "float64", seed=3)]

    def parts(ys) -> list:
        """Of each process: it has some results, and uses them in an order of its own."""
        return [part_of_loss(k, y) for k, y in enumerate(ys) if y is not None]

    def program(x):
        with comm.GradientTape() as tape:
            tape.watch(x)
            spec = tf.TensorSpec((4,), tf.float64)
            (total,) = comm.reduce([x], line, "data", root=root)
            (back,) = comm.broadcast([spec if total is None else total**2], line, "data", root=root)
            (unused,) = comm.all_reduce([x], line, "data", algorithm="ring")
            (joined,) = comm.gather([back * x], line, "data", root=0, algorithm="tree")
            with tape.stop_recording():
                comm.all_reduce([x], line, "data")
            found = parts([total, back, joined])
            loss = (
                tf.add_n(found[:: 1 if index else -1]) if index != 0 or joined is not None else None
            )
        return tape.gradient(loss, x)

    got = (tf.function(program, autograph=False) if traced else program)(arrays[index])
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        total = tf.add_n(arrays)
        back = total**2
        joined = tf.concat([back * x for x in arrays], 0)
        losses = [part_of_loss(0, total), part_of_loss(2, joined)]
        loss = tf.add_n([*losses, *[part_of_loss(1, back)] * n])
    want = tape.gradient(loss, arrays)
    np.testing.assert_allclose(got, want[index], rtol=1e-9)
    return n


def gradients_of_gradients(index: int, n: int, traced: bool = True) -> int:
    line = mesh(n)
    arrays = [tf.constant(x) for x in values(n, (3,), "float64", seed=4)]

    def program(x):
        with comm.GradientTape() as outer:
            outer.watch(x)
            with comm.GradientTape() as inner:
                inner.watch(x)
                # Backwards the broadcast comes last, and has a result in process 0 only.
                given = tf.TensorSpec((3,), tf.float64) if index else x**2
                (first,) = comm.broadcast([given], line, "data", root=0)
                (total,) = comm.reduce([first * x**2], line, "data", root=0)
                loss = None if total is None else tf.reduce_sum(total**2)
            first = inner.gradient(loss, x)
            norm = tf.reduce_sum(first**2)
        return first, outer.gradient(norm, x)

    got = (tf.function(program, autograph=False) if traced else program)(arrays[index])
    with tf.GradientTape() as outer:
        outer.watch(arrays)
        with tf.GradientTape() as inner:
            inner.watch(arrays)
            loss = tf.reduce_sum(tf.add_n([arrays[0] ** 2 * x**2 for x in arrays]) ** 2)
        first = inner.gradient(loss, arrays)
        norm = tf.add_n([tf.reduce_sum(g**2) for g in first])
    want = first[index], outer.gradient(norm, arrays)[index]
    for w, g in zip(want, got):
        np.testing.assert_allclose(g, w, rtol=1e-9)
    return n


def gradients(index: int, n: int) -> int:
    """What the default tests run."""
    for name, options in (
        ("reduce", {"root": 1}),
        ("scatter", {}),
        ("send_recv", {"pairs": [(1, 0)]}),
    ):
        one_gradient(index, n, 1, name, True, options)
    one_gradient(index, n, 1, "gather", False, {"root": 1})
    one_gradient(index, n, 1, "broadcast", False, {})
    return gradients_of_a_program(index, n) + gradients_of_gradients(index, n)


def all_gradients(index: int, n: int) -> int:
    for traced in (True, False):
        gradients_of_a_program(index, n, traced)
        gradients_of_gradients(index, n, traced)
    return gradients_of_all(index, n)


def gradients_of_several_devices(index: int, n: int) -> int:
    return gradients_of_all(index, n, per_process=2)


def gradients_of_unequal_groups(index: int, n: int) -> int:
    """Two groups over the processes whose values differ in length from group to group."""
    tried = 0
    cut = {"cut_dim": 0, "join_dim": 1}
    for operation, first, second, options in (
        ("gather", (2,), (3,), {"root": 1}),
        ("all_gather", (2,), (3,), {"algorithm": "ring"}),
        ("scatter", (4,), (7,), {}),
        ("all_to_all", (4,), (5,), {}),
        ("all_to_all", (3, 2), (3, 4), cut),
    ):
        for traced in (True, False):
            two_groups(index, n, operation, (first, second), traced, options)
            tried += 1
    return tried


def two_groups(
    index: int, n: int, operation: str, shapes: tuple, traced: bool, options: dict
) -> None:
    """The gradients of a gradient of one operation, against one device, group by group."""
    grid, root = mesh(n, model=2), options.get("root", 0)
    groups = [
        [tf.constant(x) for x in values(n, shape, "float64", seed=5 + k)]
        for k, shape in enumerate(shapes)
    ]
    gives = operation != "scatter" or index == root
    held = [group[index] for group in groups] if gives else []
    specs = [tf.TensorSpec(shape, tf.float64) for shape in shapes]

    def program(*held):
        with comm.GradientTape() as outer:
            outer.watch(held)
            with comm.GradientTape() as tape:
                tape.watch(held)
                results = getattr(comm, operation)(list(held) or specs, grid, "data", **options)
                parts = [part_of_loss(index, y) for y in results if y is not None]
                loss = tf.add_n(parts) if parts else None
            found = tape.gradient(loss, list(held), unconnected_gradients="zero")
            norms = [tf.reduce_sum(one**2) for one in found]
            norm = tf.add_n(norms) if norms else None
        return [*found, *outer.gradient(norm, list(held))]

    got = (tf.function(program, autograph=False) if traced else program)(*held)
    of_each = [of_one_device(operation, group, root, options) for group in groups]
    want = [one[order][index] for order in (0, 1) for one in of_each] if gives else []
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12, err_msg=f"{operation} {shapes}")


def of_one_device(operation: str, xs: list, root: int, options: dict) -> tuple:
    """Gradients of a group's loss, and of the sum of their squares."""
    p = len(xs)
    with tf.GradientTape() as outer:
        outer.watch(xs)
        with tf.GradientTape() as tape:
            tape.watch(xs)
            results = uneven(operation, xs, p, root, options.get("join_dim", 0))
            parts = [part_of_loss(r, y) for r, y in enumerate(results) if y is not None]
            loss = tf.add_n(parts)
        found = tape.gradient(loss, xs, unconnected_gradients="zero")
        norm = tf.add_n([tf.reduce_sum(one**2) for one in found])
    return found, outer.gradient(norm, xs, unconnected_gradients="zero")


def uneven(operation: str, xs: list, p: int, root: int, join: int) -> list:
    """`plain`, for lengths that p does not divide: longer parts first."""
    if operation in ("gather", "all_gather"):
        return plain(operation, xs, root=root)
    parts = []
    for x in xs:
        length = int(x.shape[0])
        sizes = [length // p + (rank < length % p) for rank in range(p)]
        parts.append(tf.split(x, sizes, 0))
    if operation == "scatter":
        return parts[root]
    return [tf.concat([mine[rank] for mine in parts], join) for rank in range(p)]
