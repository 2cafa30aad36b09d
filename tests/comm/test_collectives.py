"""Each collective by each algorithm against numpy, in one process; eager and in tf.function."""

from __future__ import annotations

import kdist
from kdist import comm
from kdist.comm.algorithms import ALGORITHMS
from kdist.storage.variables import same_device

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .reference import REDUCE, assert_equal, expected, values

FUNCTIONS = {
    name: getattr(comm, name)
    for name in (
        "broadcast",
        "reduce",
        "all_reduce",
        "gather",
        "all_gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "scan",
    )
}
REDUCING = ("reduce", "all_reduce", "reduce_scatter", "scan")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8")
UNSIGNED = ("uint64", "uint32", "uint16", "uint8")


def line(p: int):
    return kdist.mesh(data=p)


def check(operation, p, shape, dtype="float64", traced=False, seed=0, **options):
    arrays = values(p, shape, dtype, seed)
    algorithm = options.pop("algorithm", "auto")
    mesh = line(p)

    def program(*given):
        return FUNCTIONS[operation](list(given), mesh, "data", algorithm=algorithm, **options)

    call = tf.function(program, autograph=False) if traced else program
    got = call(*map(tf.constant, arrays))
    assert_equal(expected(operation, arrays, **options), got, terms=3 * p)
    for rank, result in enumerate(got):
        if result is not None:
            assert result.dtype == tf.as_dtype(dtype)
            assert traced or same_device(result.device, comm.Group.of(mesh, "data").devices[rank])


@pytest.mark.parametrize("algorithm", ["torus", "torus:3x2", "torus:1x6", "torus:6x1"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_a_torus_equals_numpy(algorithm, reduction):
    for shape in ((5, 3), (2,), ()):  # fewer numbers than pieces too
        check("all_reduce", 6, shape, algorithm=algorithm, reduction=reduction)
    check("all_reduce", 6, (7,), algorithm=algorithm, reduction=reduction, traced=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_it_equals_numpy(operation, algorithm):
    for p in (1, 3, 4, 7, 8) if operation == "all_reduce" else (2, 5, 8):
        if algorithm != "hypercube" or not p & (p - 1):
            check(operation, p, (5, 3), algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_in_a_function_it_equals_numpy(operation, algorithm):
    check(operation, 4, (7, 2), traced=True, algorithm=algorithm)


@pytest.mark.parametrize("dtype", [*DTYPES, *UNSIGNED])
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_every_dtype(operation, dtype):
    check(operation, 3, (4, 2), dtype, algorithm="ring")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("reduction", REDUCE)
@pytest.mark.parametrize("operation", REDUCING)
def test_every_reduction(operation, reduction, dtype):
    if reduction == "mean" and ("int" in dtype or operation == "scan"):
        return
    for algorithm in ("direct", "halving"):
        check(operation, 4, (4,), dtype, reduction=reduction, algorithm=algorithm)
    if operation == "scan":
        check(operation, 4, (4,), dtype, reduction=reduction, exclusive=True)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_roots_dims_and_uneven_sizes(data):
    operation = data.draw(st.sampled_from(list(FUNCTIONS)))
    p = data.draw(st.integers(1, 8))
    names = [a for a in ALGORITHMS if a != "hypercube" or not p & (p - 1)]
    options = {"algorithm": data.draw(st.sampled_from(names))}
    shape = [data.draw(st.integers(0, 4)) for _ in range(2)]
    if operation in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = data.draw(st.integers(0, p - 1))
    if operation in ("gather", "all_gather", "scatter", "reduce_scatter"):
        options["dim"] = data.draw(st.integers(0, 1))
    if operation in ("scatter", "reduce_scatter") and data.draw(st.booleans()):
        sizes = data.draw(st.lists(st.integers(0, 3), min_size=p, max_size=p))
        shape[options["dim"]] = sum(sizes)
        options["sizes"] = sizes
    if operation == "all_to_all":
        options["cut_dim"] = data.draw(st.integers(0, 1))
        options["join_dim"] = data.draw(st.integers(0, 1))
        if options["cut_dim"] != options["join_dim"]:
            # Parts that are joined along another dim agree in the one that was cut.
            shape[options["cut_dim"]] = p * data.draw(st.integers(0, 2))
    if operation == "scan":
        options["exclusive"] = data.draw(st.booleans())
    check(operation, p, tuple(shape), **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gathers_of_uneven_values(algorithm):
    arrays = [np.arange(2.0 * n).reshape(n, 2) + 10 * n for n in (3, 0, 1, 2)]
    for operation in ("gather", "all_gather"):
        got = FUNCTIONS[operation](arrays, line(4), "data", algorithm=algorithm)
        assert_equal(expected(operation, arrays), got)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_to_all_of_uneven_parts(algorithm):
    sizes = [[1, 0, 2, 1], [3, 1, 0, 0], [0, 0, 0, 0], [2, 2, 1, 4]]
    arrays = [np.arange(2.0 * sum(row)).reshape(-1, 2) + 100 * s for s, row in enumerate(sizes)]
    got = comm.all_to_all(arrays, line(4), "data", sizes=sizes, algorithm=algorithm)
    assert_equal(expected("all_to_all", arrays, sizes=sizes), got)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_sizes_that_are_only_known_in_the_run(operation, algorithm):
    mesh, arrays = line(4), values(4, (6, 2), "float64")
    spec = tf.TensorSpec((None, 2), tf.float64)

    @tf.function(autograph=False, input_signature=[spec] * 4)
    def program(*given):
        return FUNCTIONS[operation](list(given), mesh, "data", algorithm=algorithm)

    assert_equal(expected(operation, arrays), program(*arrays), terms=12)


def test_each_group_of_a_mesh_communicates_by_itself():
    mesh = kdist.mesh(data=2, model=3)
    arrays = values(6, (2,), "float64")
    got = comm.all_reduce(arrays, mesh, "data", algorithm="ring")
    assert_equal([arrays[k % 3] + arrays[k % 3 + 3] for k in range(6)], got, 2)
    got = comm.scan(arrays, mesh, "model", algorithm="tree")
    want = [sum(arrays[3 * (k // 3) : k + 1]) for k in range(6)]
    assert_equal(want, got, 3)
    group = comm.Group.of(mesh, "model")
    got = comm.reduce(arrays, group, root=1)
    assert [value is None for value in got] == [True, False, True] * 2
    assert_equal([sum(arrays[3:])], [got[4]], 3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_worked_example(algorithm):
    p = 4 if algorithm == "hypercube" else 3
    given = [[2, 4, 6], [1, 2, 3], [4, 8, 12], [0, 0, 0]][:p]
    got = comm.all_reduce(list(map(tf.constant, given)), line(p), "data", algorithm=algorithm)
    assert [value.numpy().tolist() for value in got] == [[7, 14, 21]] * p


def test_only_the_root_needs_a_value():
    x = np.arange(8.0)
    given = [None, None, x, None]
    assert_equal([x] * 4, comm.broadcast(given, line(4), "data", root=2))
    assert_equal(np.split(x, 4), comm.scatter(given, line(4), "data", root=2))


def test_send_recv():
    arrays = values(4, (3,), "float32")
    got = comm.send_recv(arrays, line(4), "data", pairs=[(0, 1), (1, 2), (3, 0)])
    assert_equal([arrays[3], arrays[0], arrays[1], arrays[3]], got)
    got = comm.send_recv([arrays[0], None], line(2), "data", pairs=[(0, 1)])
    assert_equal([arrays[0]] * 2, got)
    assert_equal(arrays, comm.send_recv(arrays, line(4), "data", pairs=[(2, 2)]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_barrier_holds_all_values_back_until_the_last_is_there(algorithm):
    mesh = line(4)
    with tf.device("CPU:0"):
        counter = tf.Variable(0)

    @tf.function(autograph=False)
    def program():
        given = []
        for rank in range(4):
            with tf.device(f"CPU:{rank}"):
                # Reads the variable before the barrier, changes it on the way.
                given.append(tf.identity(counter.assign_add(1)))
        held = comm.barrier(given, mesh, "data", algorithm=algorithm)
        with tf.control_dependencies([held[3]]):
            return held, tf.raw_ops.ReadVariableOp(resource=counter.handle, dtype=tf.int32)

    held, after = program()
    assert [int(value) for value in held] == [1, 2, 3, 4]
    assert int(after) == 4
    assert comm.barrier(None, mesh, "data", algorithm=algorithm) is None


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("given", [[1, 2], np.array([1, 2]), (np.float32(1), tf.constant(2.0))])
def test_a_barrier_takes_what_becomes_a_tensor(given, traced):
    def program():
        return comm.barrier(given, line(2), "data")

    held = (tf.function(program, autograph=False) if traced else program)()
    assert [float(value) for value in held] == [1, 2]


def test_a_barrier_depends_on_every_rank():
    """In the graph there is a path from each device's value to each device's result."""

    @tf.function(autograph=False)
    def program(*given):
        return comm.barrier(list(given), line(3), "data")

    concrete = program.get_concrete_function(*[tf.TensorSpec((), tf.float32)] * 3)
    inputs = {tensor.op.name for tensor in concrete.inputs}
    for output in concrete.outputs:
        seen, todo = set(), [output.op]
        while todo:
            op = todo.pop()
            if op.name not in seen:
                seen.add(op.name)
                todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
        assert inputs <= seen


ONES = [tf.ones((4,)), tf.ones((4,))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: comm.all_reduce(ONES[:1], m, "data"), "list of 2 values.*list of 1"),
        (lambda m: comm.all_reduce(ONES, m, "model"), "no axis 'model'"),
        (lambda m: comm.all_reduce(ONES, m), "name of an axis.*axis=None"),
        (lambda m: comm.all_reduce(ONES, m, "data", algorithm="star"), "algorithm='star'"),
        (lambda m: comm.all_reduce(ONES, m, "data", algorithm="runtime"), "across processes.*auto"),
        (lambda m: comm.all_reduce(ONES, m, "data", reduction="xor"), "reduction='xor'"),
        (lambda m: comm.reduce(ONES, m, "data", root=2), "from 0 to 1.*root=2"),
        (lambda m: comm.reduce([ONES[0], None], m, "data"), "tensor of every device.*rank 1"),
        (lambda m: comm.broadcast([None, ONES[0]], m, "data"), "of rank 0.*for rank 0"),
        (lambda m: comm.all_reduce([ONES[0], tf.ones(3)], m, "data"), "one shape.*4.*3"),
        (lambda m: comm.all_reduce([ONES[0], [1]], m, "data"), "one dtype.*float32.*int32"),
        (lambda m: comm.all_reduce([[True], [True]], m, "data"), "one dtype.*bool"),
        (lambda m: comm.all_reduce([[1], [1]], m, "data", reduction="mean"), "mean of integers"),
        (lambda m: comm.scan(ONES, m, "data", reduction="mean"), "scan has no mean"),
        (lambda m: comm.gather(ONES, m, "data", dim=1), "dim.*which have 1.*dim=1"),
        (lambda m: comm.scatter(ONES, m, "data", sizes=[1, 2]), r"dim 0.*3 long.*sizes=\(1, 2\)"),
        (lambda m: comm.scatter(ONES, m, "data", sizes=[4]), "are 2 integers"),
        (lambda m: comm.all_to_all(ONES, m, "data", sizes=[[1, 3]]), "2 rows of 2"),
        (lambda m: comm.send_recv(ONES, m, "data", pairs=[(0, 1), (0, 0)]), "sends at most once"),
        (lambda m: comm.send_recv(ONES, m, "data", pairs=[(0, 2)]), "from 0 to 1"),
        (lambda m: comm.send_recv(ONES, m, "data", pairs=[(0, 1.5)]), "pair.*pairs=.*1.5"),
        (lambda m: comm.send_recv(ONES, m, "data", pairs=[(0, 1, 1)]), "pair.*pairs="),
        (lambda m: comm.scan(ONES, m, "data", exclusive="no"), "exclusive='no'"),
        (lambda m: comm.scatter(ONES, m, "data", sizes=[1.0, 2.0]), r"are 2 integers.*1\.0"),
        (lambda m: comm.scatter(ONES, m, "data", sizes=3), "are 2 integers.*sizes=3"),
        (lambda m: comm.all_to_all(ONES, m, "data", sizes=[1, 2]), "2 rows of 2"),
        (lambda m: comm.all_to_all(ONES, m, "data", sizes=3), "2 rows of 2.*sizes=3"),
        (lambda m: comm.LinkCost(a="fast", b=0), "a='fast'"),
        (lambda m: comm.LinkCost(a=True, b=0), "a=True"),
        (lambda m: comm.calibrate(m, iterations=0), "iterations=0"),
        (lambda m: comm.calibrate(m, sizes=(0, 8)), "sizes=0"),
        (lambda m: comm.reduce_scatter(ONES, m, "data", sizes=np.array([4, -1])), "are 2 integers"),
        (lambda m: comm.all_gather(ONES, m, "data", sizes=np.array([1, 1])), "dim 0.*is 1 long"),
        (lambda m: comm.scatter(ONES, m, "data", sizes=[np.bool_(True), 2]), "are 2 integers"),
        (lambda m: comm.leave(0), "finite.*timeout_seconds=0"),
        (lambda m: comm.leave(float("inf")), "finite.*timeout_seconds=inf"),
        (lambda m: comm.all_reduce(ONES, comm.Group.of(m, "data"), "x"), "leave `axis` out"),
        (lambda m: comm.Group.of(m, "data", timeout_seconds=0), "finite.*timeout_seconds=0"),
        (lambda m: tf.function(lambda: comm.barrier(None, m, "data"))(), "values=None"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(line(2))
