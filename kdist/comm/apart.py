"""Sends and receives that are calls of their own.

Only the two processes of a message take part in it. So it keeps no turn among the collectives
(`processes.lane`), and its keys count the messages from the one device to the other, not the
collectives of a graph. Within a process a sent tensor waits, in the graph that sent it, for its
receive.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any

from kdist._compat import collective_runtime
from kdist.comm import tape
from kdist.comm.call import Call
from kdist.comm.dispatch import collective, place
from kdist.comm.group import Group

import tensorflow as tf

Ends = tuple[int, int]  # positions of a source and a target in the mesh
Waiting = dict[tuple[str, str], collections.deque[Any]]
_eager: Waiting = {}
_in_graphs: weakref.WeakKeyDictionary[tf.Graph, Waiting] = weakref.WeakKeyDictionary()


def send(call: Call, values: Sequence[Any]) -> None:
    """Sends the values of the sources that are in this process; see `kdist.comm.send`."""
    group = call.group
    _check_length(call, values)
    at = dict(zip(group.local, values))
    apart: set[int] = set()
    for source, target in _ends(call):
        if source not in at:
            continue
        if not _is_value(at[source]):
            raise ValueError(
                f"send over axis {group.axis!r} needs a tensor of every source. "
                f"Received: value={at[source]} for {group.devices[source]}"
            )
        at[source] = place(at[source], group.devices[source])
        if target in at:
            _waiting(group, source, target).append(at[source])
        else:
            apart.add(source)
    if not apart:
        return
    given = [at[position] if position in apart else None for position in group.local]
    tensors = [value for value in given if value is not None]
    if tape.thread() is None and collective_runtime.recorded(tensors):
        raise ValueError(
            "A send to another process has no result that a plain tape could go back from. In both "
            "processes, make a kdist.comm.GradientTape around send and recv, in the same "
            "tf.function as they are, or send outside of the tape. "
            f"Received: a value that a tf.GradientTape watches, sent over {group}"
        )
    collective(call, given)


def recv(call: Call, values: Sequence[Any] | None) -> list[Any]:
    """What the targets in this process get, None elsewhere; see `kdist.comm.recv`."""
    group = call.group
    if values is None:
        values = [None] * len(group.local)
    _check_length(call, values)
    at = dict(zip(group.local, values))
    found: dict[int, Any] = {}
    given: dict[int, Any] = {}
    for source, target in _ends(call):
        if target in at and source in at:
            found[target] = _taken(group, source, target)
        elif target in at:
            value = at[target]
            if not _is_value(value) and not isinstance(value, tf.TensorSpec):
                raise ValueError(
                    f"recv over axis {group.axis!r} from another process must know what comes: "
                    "give tf.TensorSpec(shape, dtype) for every target. "
                    f"Received: value={value} for {group.devices[target]}"
                )
            spec = value if isinstance(value, tf.TensorSpec) else tf.convert_to_tensor(value)
            given[target] = tf.TensorSpec(spec.shape, spec.dtype)
    if given:
        arrived = collective(call, [given.get(position) for position in group.local])
        found |= {p: x for p, x in zip(group.local, arrived) if x is not None}
    return [found.get(position) for position in group.local]


def _ends(call: Call) -> list[Ends]:
    return [(row[s], row[t]) for row in call.group.local_rows for s, t in call.pairs]


def _is_value(value: Any) -> bool:
    return value is not None and not isinstance(value, tf.TensorSpec)


def _check_length(call: Call, values: Sequence[Any]) -> None:
    devices = len(call.group.local)
    if not isinstance(values, list | tuple) or len(values) != devices:
        raise ValueError(
            f"{call.operation} over axis {call.group.axis!r} takes a list of {devices} values, one "
            f"per device of the mesh in this process. Received: values={str(values)[:200]}"
        )


def _waiting(group: Group, source: int, target: int) -> collections.deque[Any]:
    """What was sent within this process, in this graph, and not received yet."""
    waiting = _eager
    if not tf.executing_eagerly():
        waiting = _in_graphs.setdefault(tf.compat.v1.get_default_graph(), {})
    ends = (group.devices[source], group.devices[target])
    return waiting.setdefault(ends, collections.deque())


def _taken(group: Group, source: int, target: int) -> tf.Tensor:
    waiting = _waiting(group, source, target)
    if not waiting:
        raise ValueError(
            "Within a process a send comes before its recv, both eagerly or both in one "
            f"tf.function. Received: nothing sent from {group.devices[source]} to "
            f"{group.devices[target]} over axis {group.axis!r}"
        )
    with tf.device(group.devices[target]):
        return tf.identity(waiting.popleft())
