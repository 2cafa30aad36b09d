"""Collectives in which ranks differ: prefix sums, sends, receives, waiting; see `collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.comm import apart
from kdist.comm.call import AUTO, Call
from kdist.comm.collectives import Mesh, Results, _as_tuple, group_of, run
from kdist.comm.dispatch import collective, place

import tensorflow as tf


def scan(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    reduction: str = "sum",
    exclusive: bool = False,
    algorithm: str = AUTO,
) -> Results:
    """Combines, on each rank, the values of the ranks up to it: a prefix sum.

    Args:
        values: Tensors of one shape, one per device.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        reduction: "sum", "max", "min" or "product".
        exclusive: Leave the rank's own value out; rank 0 then gets what changes nothing (0, 1,
            the smallest or the largest number).
        algorithm: As in `broadcast`.

    Returns:
        Tensors of that shape.

    Raises:
        ValueError: As `reduce`, and for a mean.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant(1), tf.constant(2)]
        >>> [int(one) for one in kdist.comm.scan(values, kdist.mesh(data=2), "data")]
        [1, 3]
    """
    if reduction == "mean":
        raise ValueError(
            "A scan has no mean. Scan by 'sum' and divide each rank's result by the number of "
            "values in it. Received: reduction='mean'"
        )
    return run(
        values,
        mesh,
        axis,
        operation="scan",
        reduction=reduction,
        exclusive=exclusive,
        algorithm=algorithm,
    )


def send_recv(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    pairs: Sequence[tuple[int, int]],
) -> Results:
    """Sends values from ranks to ranks; who receives nothing keeps its own.

    Args:
        values: One per device: a tensor for each source; for a target that has no value, None (in
            one process) or a `tf.TensorSpec` of what comes.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        pairs: (source, target) ranks along the axis; a rank is at most once a source and at most
            once a target.

    Returns:
        What each device received, or its own value.

    Raises:
        ValueError: As `broadcast`, and for pairs that do not fit.
        PeerError: As `broadcast`.

    Example:
        >>> mesh, values = kdist.mesh(data=2), [tf.constant(1), None]
        >>> [int(one) for one in kdist.comm.send_recv(values, mesh, "data", pairs=[(0, 1)])]
        [1, 1]
    """
    return run(
        values,
        mesh,
        axis,
        operation="send_recv",
        pairs=tuple(tuple(pair) for pair in pairs),
    )


def send(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    pairs: Sequence[tuple[int, int]],
) -> None:
    """Sends values from ranks to ranks that `recv` them, each in calls of their own.

    Only the processes of a pair need to call: one or more of them with `send`, the other with
    `recv`. Messages from a device to another arrive in the order of the calls. Eagerly, a send to
    another process returns when it was received; in a `tf.function` it goes on beside the rest,
    and the function ends when it was received. Within a process the send comes before its recv, in
    the same graph. Its gradient is a recv: across processes, with `kdist.comm.GradientTape`.

    Args:
        values: One per device: a tensor for each source, else None.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        pairs: (source, target) ranks along the axis; those with a source elsewhere are passed over.
            A rank is at most once a source and at most once a target.

    Raises:
        ValueError: As `broadcast`, and for pairs that do not fit.
        PeerError: As `broadcast`.

    Example:
        >>> mesh = kdist.mesh(data=2)
        >>> kdist.comm.send([tf.constant(1), None], mesh, "data", pairs=[(0, 1)])
        >>> nothing, value = kdist.comm.recv(None, mesh, "data", pairs=[(0, 1)])
        >>> nothing, int(value)
        (None, 1)
    """
    apart.send(_call_apart("send", mesh, axis, pairs), values)


def recv(
    values: Sequence[Any] | None,
    mesh: Mesh,
    axis: str | None = None,
    *,
    pairs: Sequence[tuple[int, int]],
) -> Results:
    """Takes what `send` sends; its gradient is a send.

    Args:
        values: One per device: for each target a `tf.TensorSpec` of what comes from another
            process, else None. None: all within this process.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        pairs: As in `send`; those with a target elsewhere are passed over.

    Returns:
        What each device received, None where it received nothing.

    Raises:
        ValueError: As `send`, and where nothing was sent within a process.
        PeerError: As `broadcast`.

    Example:
        >>> mesh = kdist.mesh(data=2)
        >>> kdist.comm.send([None, tf.constant([1, 2])], mesh, "data", pairs=[(1, 0)])
        >>> value, nothing = kdist.comm.recv(None, mesh, "data", pairs=[(1, 0)])
        >>> value.numpy().tolist(), nothing
        ([1, 2], None)
    """
    return apart.recv(_call_apart("recv", mesh, axis, pairs), values)


def _call_apart(
    operation: str, mesh: Mesh, axis: str | None, pairs: Sequence[tuple[int, int]]
) -> Call:
    group = group_of(mesh, axis)
    return Call(operation=operation, group=group, pairs=_as_tuple(pairs))


def barrier(
    values: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    *,
    algorithm: str = AUTO,
) -> Results | None:
    """Waits for every rank.

    Args:
        values: Tensors, one per device. The results are the same tensors, none of which is there
            before all of the group are. None, eagerly: the call returns when all ranks are in it.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        algorithm: Of the all-reduce of one number that it is.

    Returns:
        The values, or None.

    Raises:
        ValueError: As `broadcast`; without values inside of `tf.function`, where nothing would
            wait for it.
        PeerError: As `broadcast`.

    Example:
        >>> mesh = kdist.mesh(data=2)
        >>> kdist.comm.barrier(mesh=mesh, axis="data")
        >>> values = [tf.constant(1), tf.constant(2)]
        >>> [int(one) for one in kdist.comm.barrier(values, mesh, "data")]
        [1, 2]
    """
    if mesh is None:
        raise ValueError("A barrier is over an axis of a mesh. Received: mesh=None")
    group = group_of(mesh, axis)
    if values is None and not tf.executing_eagerly():
        raise ValueError(
            "Inside tf.function a barrier holds values back: give them, and use what it returns. "
            "Received: values=None"
        )
    if values is not None and len(values) != len(group.local):
        raise ValueError(
            f"A barrier takes a value per device of this process, {len(group.local)}, or None. "
            f"Received: {len(values)} values"
        )
    pairs = zip(values, group.local_devices) if values is not None else ()
    given = [place(value, device) for value, device in pairs]
    tokens = []
    for k, device in enumerate(group.local_devices):
        with tf.device(device), tf.control_dependencies(given[k : k + 1]):
            # One element per rank: a ring has something to send in every message.
            tokens.append(tf.zeros([group.size], tf.int32))
    done = collective(Call(operation="all_reduce", group=group, algorithm=algorithm), tokens)
    if values is None:
        return None
    results = []
    for value, token, device in zip(given, done, group.local_devices):
        with tf.device(device), tf.control_dependencies([token]):
            results.append(tf.identity(value))
    return results
