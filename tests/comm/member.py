"""One process of a group; started by `cluster.py` with (scenario, index, addresses as JSON).

Prints one line of JSON: what the scenario returns.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import kdist
from kdist import comm
from kdist.comm.algorithms import ALGORITHMS

import keras
import member_gradients
import numpy as np
import tensorflow as tf
from member_parts import OPERATIONS, mesh, own
from reference import assert_equal, expected, values

TIMEOUT = 4.0
BROKEN = ("missing", "killed", "raises")
LATE_SECONDS = 3.0


def every_collective(
    index: int, n: int, per_process: int = 1, algorithms: tuple[str, ...] = ("auto", *ALGORITHMS)
) -> int:
    """Each operation by each algorithm against numpy; returns how many were tried."""
    p = n * per_process
    line, tried = mesh(n, per_process), 0
    for operation in OPERATIONS:
        for algorithm in algorithms:
            if algorithm == "hypercube" and p & (p - 1):
                continue
            arrays = values(p, (5, 2), "float64", seed=tried)
            root = {"root": p - 1} if operation in ("broadcast", "reduce", "gather") else {}
            mine = own(index, per_process, arrays)
            if operation in ("broadcast", "scatter"):  # only the root's value may count
                first = index * per_process
                spec = tf.TensorSpec((5, 2), tf.float64)
                mine = [x if first + k == root.get("root", 0) else spec for k, x in enumerate(mine)]
            function = getattr(comm, operation)
            got = function(mine, line, "data", algorithm=algorithm, **root)
            want = own(index, per_process, expected(operation, arrays, **root))
            assert_equal(want, got, 3 * p)
            tried += 1
    return tried


def several_devices(index: int, n: int) -> int:
    return every_collective(index, n, per_process=2)


def dtypes_and_reductions(index: int, n: int) -> int:
    line, tried = mesh(n), 0
    kinds = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8")
    for dtype in (*kinds, "uint64", "uint32", "uint16", "uint8"):
        arrays = values(n, (3,), dtype)
        for reduction in ("sum", "max", "min", "product", "mean"):
            if reduction == "mean" and "int" in dtype:
                continue
            for algorithm in ("auto", "ring"):
                got = comm.all_reduce(
                    [arrays[index]], line, "data", reduction=reduction, algorithm=algorithm
                )
                want = expected("all_reduce", arrays, reduction=reduction)
                assert_equal([want[index]], got, 3 * n)
                tried += 1
    big = [np.array([2**63 + 5, 3], np.uint64)] * n  # does not fit a signed number
    assert_equal([big[0]], comm.broadcast([big[0]], line, "data", algorithm="tree"))
    return tried


def in_a_function(index: int, n: int) -> list[float]:
    """Several collectives in one function, twice the same, unused results, with gradients."""
    line = mesh(n)

    @tf.function(autograph=False)
    def program(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (total,) = comm.all_reduce([x], line, "data", algorithm="ring")
            comm.reduce([x], line, "data", root=n - 1)  # nobody uses it
            (again,) = comm.all_reduce([2 * x], line, "data", algorithm="ring")
            (joined,) = comm.all_gather([x], line, "data", algorithm="tree")
            loss = tf.reduce_sum(total * again) + tf.reduce_sum(joined**2)
        return total, again, tape.gradient(loss, x)

    x = tf.constant([index + 1.0, 2.0], tf.float64)
    for _ in range(3):
        total, again, gradient = program(x)
    ones = [np.array([r + 1.0, 2.0]) for r in range(n)]
    assert_equal([sum(ones), 2 * sum(ones)], [total, again], n)
    # Of n times 2·(Σx)², and of n times Σx².
    assert_equal([n * 4 * sum(ones) + n * 2 * ones[index]], [gradient], 9)
    with tf.GradientTape() as tape:  # around the eager call, which is a function inside
        tape.watch(x)
        (part,) = comm.reduce_scatter([tf.tile(x, [n])], line, "data")
        loss = tf.reduce_sum(part * (index + 1.0))
    found = tape.gradient(loss, x)
    assert found.numpy().tolist() == [n * (n + 1) / 2] * 2
    return [float(value) for value in total]


def apart(index: int, n: int) -> int:
    """Sends and receives as calls of their own, of which the last process knows nothing."""
    line, spec = mesh(n), tf.TensorSpec((2,), tf.float64)
    arrays = [tf.constant(x) for x in values(n, (2,), "float64", seed=7)]
    there, back = [(0, 1)], [(1, 0)]

    def program(x):
        with comm.GradientTape() as tape:
            tape.watch(x)
            if index == 0:
                comm.send([x], line, "data", pairs=there)
                comm.send([x**2], line, "data", pairs=there)
                (got,) = comm.recv([spec], line, "data", pairs=back)
            elif index == 1:
                # Before it receives anything: nobody waits for a turn.
                comm.send([3 * x], line, "data", pairs=back)
                (first,) = comm.recv([spec], line, "data", pairs=there)
                (second,) = comm.recv([spec], line, "data", pairs=there)
                got = first * second
            else:
                got = x
            (total,) = comm.all_reduce([got], line, "data", algorithm="ring")
            loss = tf.reduce_sum(total**2) if index == 0 else None
        return got, tape.gradient(loss, x)

    step = tf.function(program, autograph=False)
    for _ in range(3):
        got, grad = step(arrays[index])
    want = [3 * arrays[1], arrays[0] ** 3, arrays[-1]][min(index, 2)]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        total = 3 * arrays[1] + arrays[0] ** 3 + (arrays[2] if n > 2 else 0)
        loss = tf.reduce_sum(total**2)
    np.testing.assert_allclose(grad, tape.gradient(loss, arrays)[index], rtol=1e-9)
    if index < 2:
        apart_eagerly(index, line, spec, arrays)
    comm.barrier(None, line, "data")
    return n


def apart_eagerly(index: int, line, spec, arrays: list) -> None:
    """Both ways, by processes that each call one side; integers; what a plain tape is told."""
    x = arrays[index]
    with comm.GradientTape() as tape:
        tape.watch(x)
        if index == 0:
            comm.send([x], line, "data", pairs=[(0, 1)])
            (got,) = comm.recv([spec], line, "data", pairs=[(1, 0)])
            loss = tf.reduce_sum(got**2)
        else:
            (got,) = comm.recv([spec], line, "data", pairs=[(0, 1)])
            comm.send([got * x], line, "data", pairs=[(1, 0)])
            loss = None
    want = 2 * arrays[0] * arrays[1] * arrays[0] * arrays[1] / x
    np.testing.assert_allclose(tape.gradient(loss, x), want, rtol=1e-9)
    if index == 0:
        comm.send([tf.constant([5], tf.int8)], line, "data", pairs=[(0, 1)])
        with tf.GradientTape() as plain_tape:
            plain_tape.watch(x)
            try:
                comm.send([x], line, "data", pairs=[(0, 1)])
                raise AssertionError("a plain tape would have missed it")
            except ValueError as error:
                assert "GradientTape around send and recv" in str(error)
    else:
        (got,) = comm.recv([tf.TensorSpec((1,), tf.int8)], line, "data", pairs=[(0, 1)])
        assert_equal([np.array([5], np.int8)], [got])


def uneven(index: int, n: int) -> int:
    line = mesh(n)
    arrays = [np.arange(2.0 * (r + 1)).reshape(-1, 2) for r in range(n)]
    sizes = [r + 1 for r in range(n)]
    for algorithm in ("direct", "ring", "tree", "halving"):
        for operation in ("gather", "all_gather"):
            got = getattr(comm, operation)(
                [arrays[index]], line, "data", sizes=sizes, algorithm=algorithm
            )
            assert_equal([expected(operation, arrays)[index]], got)
        table = [[(s + d) % 3 for d in range(n)] for s in range(n)]
        parts = [np.arange(float(sum(row))) + 10 * s for s, row in enumerate(table)]
        got = comm.all_to_all([parts[index]], line, "data", sizes=table, algorithm=algorithm)
        assert_equal([expected("all_to_all", parts, sizes=table)[index]], got)
    return n


def sends_and_axes(index: int, n: int) -> int:
    """Send and receive, a barrier, and two groups at once along an inner axis."""
    line = mesh(n)
    sent = comm.send_recv(
        [tf.constant([float(index)]) if index == 0 else tf.TensorSpec((1,), tf.float32)],
        line,
        "data",
        pairs=[(0, n - 1)],
    )
    assert [None if v is None else v.numpy().tolist() for v in sent] == [
        [0.0] if index in (0, n - 1) else None
    ]
    comm.barrier(None, line, "data")
    grid = mesh(n, model=2)
    given = [tf.constant(10.0 * index), tf.constant(10.0 * index + 1)]
    for algorithm in ("auto", "ring"):
        got = comm.all_reduce(given, grid, "data", algorithm=algorithm)
        assert [float(v) for v in got] == [sum(10.0 * r + m for r in range(n)) for m in (0, 1)]
    each = own(index, 2, values(2 * n, (5,), "float64"))
    total = expected("all_reduce", values(2 * n, (5,), "float64"))[:2]
    for algorithm in ("torus", f"torus:{n}x2"):  # rows are processes; and rows across them
        assert_equal(total, comm.all_reduce(each, mesh(n, 2), "data", algorithm=algorithm), 6 * n)
    inner = comm.all_reduce(given, grid, "model")
    assert [float(v) for v in inner] == [20.0 * index + 1] * 2
    return len(got)


def refusals(index: int, n: int) -> list[str]:
    line, texts = mesh(n), []

    def refused(call) -> None:
        try:
            call()
        except ValueError as error:
            texts.append(str(error))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None,), tf.float32)])
    def unknown(x):
        return comm.all_reduce([x], line, "data")

    def gradient():
        x = tf.constant([1.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = comm.broadcast([x], line, "data")  # a plain tape
        return tape.gradient(y, x)

    refused(lambda: unknown(tf.ones(3)))
    refused(lambda: comm.broadcast([None], line, "data", root=1 - index))
    refused(lambda: comm.connect(["a:1"], 0))
    refused(lambda: mesh_of_strangers(n))
    refused(gradient)
    return texts


def mesh_of_strangers(n: int) -> comm.Group:
    names = [f"/job:worker/task:{task}/device:CPU:0" for task in range(n + 1)]
    return comm.Group.of(keras.distribution.DeviceMesh((n + 1,), ["data"], names), "data")


def several(index: int, n: int) -> list[str]:
    """What the default tests run, in one start."""
    assert every_collective(index, n, algorithms=("ring",)) == len(OPERATIONS)
    assert in_a_function(index, n) == [3.0, 4.0]
    assert sends_and_axes(index, n) == 2
    return refusals(index, n)


def missing(index: int, n: int) -> dict:
    """The last process never calls."""
    if index == n - 1:
        time.sleep(3 * TIMEOUT)
        return {}
    return failure(lambda: comm.all_reduce([tf.ones(3)], mesh(n), "data", algorithm="direct"))


def killed(index: int, n: int) -> dict:
    """The last process is killed between two collectives, as a crash would."""
    line = mesh(n)

    @tf.function(autograph=False)
    def step(x):
        return comm.all_reduce([x], line, "data", algorithm="ring")

    if index == n - 1:
        step(tf.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)

    def call() -> None:
        # Its last message may not have left when it dies: then the first of the two fails.
        with comm.named_errors():
            step(tf.ones(3))
            step(tf.ones(3))

    return failure(call)


def late(index: int, n: int) -> dict:
    """The last process has more to do; returns when this one began to leave, and was free to."""
    return _leaves(late=index == n - 1, n=n)


def late_first(index: int, n: int) -> dict:
    """The first process has more to do; the others wait for its answer."""
    return _leaves(late=index == 0, n=n)


def _leaves(late: bool, n: int) -> dict:
    comm.all_reduce([tf.ones(3)], mesh(n), "data")
    time.sleep(LATE_SECONDS if late else 0)
    began = time.monotonic()  # one clock for all processes of a machine
    comm.leave()
    return {"began": began, "free": time.monotonic()}


def gives_up(index: int, n: int) -> list[str]:
    """All but the last process leave after a second, before the last one does."""
    comm.all_reduce([tf.ones(3)], mesh(n), "data")
    time.sleep(LATE_SECONDS if index == n - 1 else 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        comm.leave(1.0)
    return [str(one.message) for one in told if "leaves before" in str(one.message)]


def auto_of_uneven(index: int, n: int) -> int:
    """The processes' values are of very different sizes; both must choose the same algorithm."""
    sizes = [[300_000] * 4] * 2 + [[10] * 4] * 2
    mine = [tf.ones([sum(sizes[2 * index + k])]) for k in range(2)]
    found = comm.all_to_all(mine, mesh(n, 2), "data", sizes=sizes)
    return sum(int(part.shape[0]) for part in found)


def at_exit(index: int, n: int) -> float:
    """Ends without `leave`, as programs do; the last process later. `main` prints the times."""
    comm.all_reduce([tf.ones(3)], mesh(n), "data")
    time.sleep(LATE_SECONDS if index == n - 1 else 0)
    return time.monotonic()


def raises(index: int, n: int) -> dict:
    """The last process ends by an exception of its own, the others wait for it in a collective."""
    comm.all_reduce([tf.ones(3)], mesh(n), "data")
    if index == n - 1:
        raise RuntimeError("as a bug would")
    return failure(lambda: comm.all_reduce([tf.ones(3)], mesh(n), "data", algorithm="direct"))


def failure(call) -> dict:
    started = time.monotonic()
    try:
        call()
    except comm.PeerError as error:
        return {
            "seconds": time.monotonic() - started,
            "text": str(error),
            "peers": error.peers,
            "axis": error.axis,
            "operation": error.operation,
        }
    return {"text": "no error"}


def main() -> None:
    scenario, index, addresses = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    kdist.init(cpu_devices=2)
    times: dict[str, float] = {}
    if scenario == "at_exit":  # the last to be registered is the first to run: after kdist's own
        atexit.register(lambda: print(json.dumps(times | {"free": time.monotonic()}), flush=True))
    # A first step may take long on a busy machine; only failures need a short timeout.
    comm.connect(addresses, index, timeout_seconds=TIMEOUT if scenario in BROKEN else 60.0)
    scenarios = vars(member_gradients) | globals()
    result = scenarios[scenario](index, len(addresses))
    if scenario == "at_exit":
        times["began"] = result
        return
    print(json.dumps(result), flush=True)
    if scenario in BROKEN:
        time.sleep(1.0)  # who has failed is not to be taken for who died
    comm.leave()
    # Servers of peers that are gone make TensorFlow's own exit slow.
    os._exit(0)


if __name__ == "__main__":
    main()
