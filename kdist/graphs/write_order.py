"""Variables of a step are written after everything that came before has read them.

TensorFlow orders a write behind the reads of the same variable by an edge of the graph. Its
optimizer drops the edge where another path says the same, and of that path it may drop an edge as
well. Then a device whose results the update does not need (one of several that compute the same)
may read a weight that is the next step's already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kdist._compat import keras_trainer

import tensorflow as tf

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
"""Operations that only read a variable."""


@dataclasses.dataclass
class _Before:
    """What earlier blocks have seen of a graph; by names, as what has operations keeps their graph.

    Attributes:
        covered: How many of its operations lie before the last barrier.
        barriers: By variable, or by device, the name of the last barrier there.
    """

    covered: int = 0
    barriers: dict[str, str] = dataclasses.field(default_factory=dict)


_before: weakref.WeakKeyDictionary[Any, dict[bool, _Before]] = weakref.WeakKeyDictionary()
"""By graph, for barriers of devices and for those of variables."""


@contextlib.contextmanager
def writes_after_reads(apart: bool = False) -> Iterator[None]:
    """Makes what the block writes wait for all reads that the graph of now has before the block.

    One operation per device waits for the reads there, and the writes there wait for it. It has a
    state in TensorFlow's eyes, so that no edge from or to it is ever taken for another path's. When
    executing eagerly everything is in order.

    Args:
        apart: One operation per variable: a device that frees gradients as it goes would otherwise
            keep all until the last layer's weights have been read.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    known = _before.setdefault(graph, {}).setdefault(apart, _Before())
    before = graph.get_operations()
    key = _variables if apart else _Devices(graph).of
    earlier = {one: graph.get_operation_by_name(name) for one, name in known.barriers.items()}
    made = _barriers(before[known.covered :], key, earlier)
    known.covered = len(before) + len(made)
    known.barriers.update({one: op.name for one, op in made.items()})
    barriers, start = earlier | made, known.covered
    yield
    for op in graph.get_operations()[start:]:
        if op.type not in READS:
            waits = [barriers[one] for one in key(op) if one in barriers]
            if waits:
                keras_trainer.run_after(op, waits)


def _barriers(
    operations: list[tf.Operation],
    key: Callable[[tf.Operation], list[str]],
    earlier: Mapping[str, tf.Operation],
) -> dict[str, tf.Operation]:
    """By variable, or by device, an operation that waits for the reads there, and those before."""
    reads: dict[str, list[tf.Operation]] = {}
    for op in operations:
        if op.type in READS:
            for one in key(op):
                reads.setdefault(one, []).append(op)
    barriers = {}
    for one, found in reads.items():
        with tf.control_dependencies([*found, *([earlier[one]] if one in earlier else [])]):
            barrier = tf.raw_ops.VarIsInitializedOp(resource=found[0].inputs[0]).op
        keras_trainer.run_independently(barrier)
        barriers[one] = barrier
    return barriers


class _Devices:
    """Where the variables lie that operations of a graph read or write."""

    def __init__(self, graph: Any) -> None:
        captures = getattr(graph, "captures", ())
        self._device = {inner.ref(): str(outer.device) for outer, inner in captures}

    def of(self, op: tf.Operation) -> list[str]:
        """Devices of the variables among an operation's inputs, each once."""
        handles = [i for i in op.inputs if i.dtype == tf.resource]
        return list(dict.fromkeys(self._device.get(i.ref(), i.device) for i in handles))


def _variables(op: tf.Operation) -> list[str]:
    """Names of the handles of variables among an operation's inputs, each once."""
    return list(dict.fromkeys(i.name for i in op.inputs if i.dtype == tf.resource))


def order_to_come(graph: Any) -> dict[tf.Operation, list[tf.Operation]]:
    """What TensorFlow will make operations wait for when the function of a graph is complete.

    It keeps reads and writes of a variable, and what has other effects, in the order in which they
    were made. A function that is given a variable counts as one that writes it.
    """
    found: dict[tf.Operation, list[tf.Operation]] = {}
    written: dict[Any, tf.Operation] = {}
    read: dict[Any, list[tf.Operation]] = {}
    for op in graph.get_operations():
        handles: list[Any] = _variables(op)
        if not handles and op.op_def.is_stateful:
            handles = [None]
        if handles and keras_trainer.runs_independently(op):
            continue
        for handle in handles:
            before = [written[handle]] if handle in written else []
            if op.type in READS:
                read.setdefault(handle, []).append(op)
            else:
                before += read.pop(handle, [])
                written[handle] = op
            if before:
                found.setdefault(op, []).extend(before)
    return found
