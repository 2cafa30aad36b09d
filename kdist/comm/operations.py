"""Each collective over one group of devices: cut the values, run the schedule, join the result.

A value is a tensor on its device, a `tf.TensorSpec` where only its shape matters, or None: of a
rank in another process, or where the operation takes none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kdist.comm import cost, processes, torus
from kdist.comm.algorithms import schedule
from kdist.comm.call import AUTO, RUNTIME, RUNTIME_DTYPES, Call
from kdist.comm.execute import (
    FOLDS,
    ChunkSlot,
    Finish,
    Fold,
    Held,
    Row,
    Shape,
    run,
    shape_of,
    task_of,
)
from kdist.comm.messages import PREFIX, RUNNING, Message, Schedule
from kdist.storage import nccl

import tensorflow as tf

Value = Any  # tf.Tensor | tf.TensorSpec | None
Values = Sequence[Value]
_MERGE = {"sum": "Add", "mean": "Add", "product": "Mul", "max": "Max", "min": "Min"}


def perform(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """Runs a call over one group.

    Args:
        call: What is asked.
        values: One per rank.
        row: Its devices.

    Returns:
        One result per rank; None for a rank elsewhere, and where the operation gives none.
    """
    if row.size == 1 and call.operation != "send_recv":
        call = call.changed(algorithm="direct")
    return _OPERATIONS[call.operation](call, values, row)


def algorithm_of(call: Call, nbytes: float) -> str:
    """What `"auto"` stands for.

    In one process a message is a pointer, and what counts is the passes over memory: direct has
    the fewest. Between processes the cost model decides.
    """
    if call.algorithm != AUTO:
        return call.algorithm
    if not call.group.crosses_processes:
        return "direct"
    return cost.cheapest(call.operation, nbytes, call.group.size, cost.DEFAULT_LINK)


def balanced(length: Any, parts: int) -> list[Any]:
    """Cuts a length as equally as possible, longer parts first.

    Args:
        length: An integer, or a scalar tensor.
        parts: Number of parts.
    """
    if isinstance(length, int):
        return [length // parts + (part < length % parts) for part in range(parts)]
    return [length // parts + tf.cast(part < length % parts, length.dtype) for part in range(parts)]


def _fold(call: Call) -> tuple[Fold, Finish | None]:
    if call.reduction == "mean":
        return FOLDS["sum"], lambda total: total / tf.cast(call.group.size, total.dtype)
    return FOLDS[call.reduction], None


def _like(values: Values) -> tuple[Shape, str]:
    """Shape and dtype of the first value that is given."""
    given = next(value for value in values if value is not None)
    return shape_of(given), given.dtype.name


def full_bytes(call: Call, values: Values) -> float:
    """Size of the full buffer, as `cost.predict` takes it; dims of unknown length count as 1.

    Where rows of a value differ from rank to rank, `sizes` says so to every process alike: the
    algorithm that follows must be the same in all of them.
    """
    shape, dtype = _like(values)
    lengths = list(shape)
    if call.sizes is not None:
        rows = call.sizes if call.operation == "all_to_all" else (call.sizes,)
        lengths[call.dim] = max(sum(n for n in row if isinstance(n, int)) for row in rows)
    elif call.operation in ("gather", "all_gather"):
        lengths.append(call.group.size)
    return math.prod(n for n in lengths if isinstance(n, int)) * tf.as_dtype(dtype).size


def _given(values: Values, rank: int) -> bool:
    return tf.is_tensor(values[rank])


# Operations on whole values: a value is flattened and cut into pieces.


def _whole(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """Broadcast, reduce, all_reduce."""
    algorithm = algorithm_of(call, full_bytes(call, values))
    if call.operation == "all_reduce" and row.size > 1 and not all(row.local):
        fits = _like(values)[1] in RUNTIME_DTYPES
        if call.algorithm == RUNTIME or (call.algorithm == AUTO and fits):
            return _runtime_all_reduce(call, values, row)
    if _is_summed_by_nccl(call, values, row):
        return _nccl(call, values, row)
    if algorithm == torus.TORUS and not all(row.local):
        algorithm = torus.of_processes([task_of(device) for device in row.devices])
    plan = schedule(call.operation, algorithm, row.size, call.root)
    fold, finish = _fold(call)
    shape, dtype = _like(values)
    held: Held = [{} for _ in range(row.size)]
    for rank in row.ranks:
        if call.operation != "broadcast" or rank == call.root:
            with row.on(rank):
                pieces = _pieces(values[rank], plan.pieces)
            held[rank] = {chunk: ChunkSlot([piece]) for chunk, piece in enumerate(pieces)}
    remote = None
    if not all(row.local):
        lengths = balanced(math.prod(shape), plan.pieces)
        shapes = {c: (n,) if plan.pieces > 1 else tuple(shape) for c, n in enumerate(lengths)}
        remote = (shapes, dtype)
    run(plan, held, row, fold=fold, finish=finish, remote=remote)
    results: list[tf.Tensor | None] = [None] * row.size
    for rank in row.ranks:
        if call.operation != "reduce" or rank == call.root:
            with row.on(rank):
                mine = [held[rank][chunk].read(fold, finish) for chunk in range(plan.pieces)]
                results[rank] = mine[0] if len(mine) == 1 else tf.reshape(tf.concat(mine, 0), shape)
    return results


def _pieces(value: tf.Tensor, count: int) -> list[tf.Tensor]:
    if count == 1:
        return [value]
    flat = tf.reshape(value, [-1])
    length = flat.shape[0] if flat.shape[0] is not None else tf.size(flat)
    return tf.split(flat, balanced(length, count), num=count)


def _runtime_all_reduce(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """Within this process directly, one device of each process by TensorFlow's all-reduce."""
    fold, finish = _fold(call)
    leaders: dict[tuple[str, int], str] = {}
    for device in row.devices:
        leaders.setdefault(task_of(device), device)
    first = row.ranks[0]
    peer = next(d for task, d in leaders.items() if d != row.devices[first])
    name = processes.node_name(call.operation, row.axis, "from", peer, 0)
    with row.on(first):
        total = ChunkSlot([tf.identity(values[rank]) for rank in row.ranks]).read(fold)
        total = processes.reduce_all(
            total,
            _MERGE[call.reduction],
            list(leaders.values()),
            f"{row.about}|{'|'.join(row.devices)}",
            name,
            row.timeout_seconds,
        )
        row.started.append(total.op)
        total = finish(total) if finish else total
    results: list[tf.Tensor | None] = [None] * row.size
    for rank in row.ranks:
        with row.on(rank):
            results[rank] = tf.identity(total)
    return results


def _is_summed_by_nccl(call: Call, values: Values, row: Row) -> bool:
    if call.operation == "broadcast" or call.reduction not in ("sum", "mean"):
        return False
    if call.algorithm != AUTO or tf.executing_eagerly() or not all(row.local):
        return False
    return nccl.adds_up(row.devices, row.devices[call.root or 0], _like(values)[1])


def _nccl(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """Reduce and all_reduce over cards of this process: one of them gets the sum."""
    root = call.root or 0
    total = nccl.summed(values, row.devices, row.devices[root])
    _, finish = _fold(call)
    with row.on(root):
        total = finish(total) if finish else total
    only = root if call.operation == "reduce" else None
    return _results(row, lambda rank: tf.identity(total), only)


# Operations on blocks: rank j has, or gets, a part of the value along a dim.


def _joined(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """Gather, all_gather."""
    shape, dtype = _like(values)
    algorithm = algorithm_of(call, full_bytes(call, values))
    plan = schedule(call.operation, algorithm, row.size, call.root)
    held: Held = [
        {rank: ChunkSlot([values[rank]])} if row.local[rank] else {} for rank in range(row.size)
    ]
    remote = None
    if not all(row.local):
        sizes = call.sizes or [shape[call.dim]] * row.size
        remote = ({j: _resized(shape, call.dim, n) for j, n in enumerate(sizes)}, dtype)
    run(plan, held, row, remote=remote)
    return _results(
        row,
        lambda rank: tf.concat(
            [held[rank][j].read(FOLDS["sum"]) for j in range(row.size)], call.dim
        ),
        only=call.root if call.operation == "gather" else None,
    )


def _cut(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """Scatter, reduce_scatter."""
    algorithm = algorithm_of(call, full_bytes(call, values))
    plan = schedule(call.operation, algorithm, row.size, call.root)
    shape, dtype = _like(values)
    fold, finish = _fold(call)
    sizes = list(call.sizes or balanced(shape[call.dim], row.size))
    held: Held = [{} for _ in range(row.size)]
    for rank in row.ranks:
        if call.operation == "reduce_scatter" or rank == call.root:
            with row.on(rank):
                blocks = tf.split(values[rank], sizes, call.dim, num=row.size)
            held[rank] = {chunk: ChunkSlot([block]) for chunk, block in enumerate(blocks)}
    shapes = {j: _resized(shape, call.dim, n) for j, n in enumerate(sizes)}
    remote = None if all(row.local) else (shapes, dtype)
    if call.operation == "scatter":
        finish = None
    run(plan, held, row, fold=fold, finish=finish, remote=remote)
    return _results(row, lambda rank: held[rank][rank].read(fold, finish))


def _all_to_all(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    p = row.size
    shape, dtype = _like(values)
    plan = schedule("all_to_all", algorithm_of(call, full_bytes(call, values)), p)
    held: Held = [{} for _ in range(p)]
    for rank in row.ranks:
        with row.on(rank):
            sizes = call.sizes[rank] if call.sizes else None
            length = shape_of(values[rank])[call.dim]
            blocks = tf.split(values[rank], list(sizes or balanced(length, p)), call.dim, num=p)
        held[rank] = {rank * p + d: ChunkSlot([block]) for d, block in enumerate(blocks)}
    remote = None
    if not all(row.local):
        table = call.sizes or [balanced(shape[call.dim], p)] * p
        # Of what each rank cuts; ranks may differ in the dim that is joined.
        joins = call.join_sizes or [shape[call.join_dim]] * p
        wholes = [_resized(shape, call.join_dim, joins[s]) for s in range(p)]
        shapes = {
            s * p + d: _resized(wholes[s], call.dim, table[s][d])
            for s in range(p)
            for d in range(p)
        }
        remote = (shapes, dtype)
    run(plan, held, row, remote=remote)
    return _results(
        row,
        lambda rank: tf.concat(
            [held[rank][s * p + rank].read(FOLDS["sum"]) for s in range(p)], call.join_dim
        ),
    )


# The rest.


def _scan(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    shape, dtype = _like(values)
    plan = schedule("scan", algorithm_of(call, full_bytes(call, values)), row.size)
    fold = FOLDS[call.reduction]
    held: Held = [{} for _ in range(row.size)]
    for rank in row.ranks:
        held[rank] = {RUNNING: ChunkSlot([values[rank]])}
        if not call.exclusive:
            held[rank][PREFIX] = ChunkSlot([values[rank]])
    remote = None if all(row.local) else ({RUNNING: shape}, dtype)
    run(plan, held, row, fold=fold, remote=remote)
    neutral = neutral_element(call.reduction, dtype)

    def result(rank: int) -> tf.Tensor:
        if PREFIX in held[rank]:
            return held[rank][PREFIX].read(fold)
        return tf.fill(shape_of(values[rank]), neutral)

    return _results(row, result)


def neutral_element(reduction: str, dtype: str) -> tf.Tensor:
    """What an exclusive scan gives where there is nothing before."""
    kind = tf.as_dtype(dtype)
    if reduction in ("max", "min") and kind.is_floating:
        return tf.cast(-math.inf if reduction == "max" else math.inf, kind)
    if reduction in ("max", "min"):
        return tf.constant(kind.min if reduction == "max" else kind.max, kind)
    return tf.constant(1 if reduction == "product" else 0, kind)


def _send_recv(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    shape, dtype = _like(values)
    messages = tuple(Message(s, t, (0,)) for s, t in call.pairs if s != t)
    plan = Schedule(operation="send_recv", algorithm="direct", size=row.size, rounds=(messages,))
    held: Held = [{0: ChunkSlot([v])} if tf.is_tensor(v) else {} for v in values]
    remote = None if all(row.local) else ({0: shape}, dtype)
    run(plan, held, row, remote=remote)
    results: list[tf.Tensor | None] = [None] * row.size
    for rank in row.ranks:
        if held[rank]:
            with row.on(rank):
                results[rank] = tf.identity(held[rank][0].read(FOLDS["sum"]))
    return results


def _apart(call: Call, values: Values, row: Row) -> list[tf.Tensor | None]:
    """One side, here, of messages whose other side is in another process."""
    results: list[tf.Tensor | None] = [None] * row.size
    for source, target in call.pairs:
        here, peer = (source, target) if call.operation == "send" else (target, source)
        if not row.local[here] or row.local[peer]:
            continue
        ends = row.devices[source], row.devices[target]
        number = processes.number_in_graph("|".join(ends))
        about = f"apart|{row.axis}|{number}"
        way = "to" if call.operation == "send" else "from"
        name = processes.node_name(call.operation, row.axis, way, row.devices[peer], number)
        with row.on(here):
            if call.operation == "send":
                operation = processes.send(values[source], *ends, about, name, row.timeout_seconds)
            else:
                spec = (values[target].shape.as_list(), values[target].dtype.name)
                arrived = processes.receive(*spec, *ends, about, name, row.timeout_seconds)
                results[target], operation = arrived, arrived.op
        row.started.append(operation)
    return results


def _results(
    row: Row, read: Callable[[int], tf.Tensor], only: int | None = None
) -> list[tf.Tensor | None]:
    results: list[tf.Tensor | None] = [None] * row.size
    for rank in row.ranks:
        if only is None or rank == only:
            with row.on(rank):
                results[rank] = read(rank)
    return results


def _resized(shape: Shape, dim: int, length: Any) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], length, *shape[dim + 1 :])


_OPERATIONS: dict[str, Callable[[Call, Values, Row], list[tf.Tensor | None]]] = {
    "broadcast": _whole,
    "reduce": _whole,
    "all_reduce": _whole,
    "gather": _joined,
    "all_gather": _joined,
    "scatter": _cut,
    "reduce_scatter": _cut,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "send_recv": _send_recv,
    "send": _apart,
    "recv": _apart,
}
