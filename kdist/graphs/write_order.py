"""Variables of a step are written after everything that came before has read them.

TensorFlow orders a write behind the reads of the same variable by an edge of the graph. Its
optimizer drops the edge where another path says the same, and of that path it may drop an edge as
well. Then a device whose results the update does not need (one of several that compute the same)
may read a weight that is the next step's already.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from kdist._compat import keras_trainer

import tensorflow as tf

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
"""Operations that only read a variable."""

_covered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By graph, how many of its operations lie before the last barrier."""


@contextlib.contextmanager
def writes_after_reads() -> Iterator[None]:
    """Makes what the block writes wait for all reads that the graph of now has before the block.

    One operation per device waits for the reads there, and the writes there wait for it. It has a
    state in TensorFlow's eyes, so that no edge from or to it is ever taken for another path's. When
    executing eagerly everything is in order.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = graph.get_operations()
    devices = _Devices(graph)
    barriers = _barriers(before[_covered.get(graph, 0) :], devices)
    _covered[graph] = len(before) + len(barriers)
    yield
    for op in graph.get_operations()[_covered[graph] :]:
        if op.type not in READS:
            waits = [barriers[d] for d in devices.of(op) if d in barriers]
            if waits:
                keras_trainer.run_after(op, waits)


def _barriers(operations: list[tf.Operation], devices: _Devices) -> dict[str, tf.Operation]:
    """By device, an operation that waits for the reads of variables there."""
    reads: dict[str, list[tf.Operation]] = {}
    for op in operations:
        if op.type in READS:
            for device in devices.of(op):
                reads.setdefault(device, []).append(op)
    barriers = {}
    for device, found in reads.items():
        with tf.control_dependencies(found):
            barrier = tf.raw_ops.VarIsInitializedOp(resource=found[0].inputs[0]).op
        keras_trainer.run_independently(barrier)
        barriers[device] = barrier
    return barriers


class _Devices:
    """Where the variables lie that operations of a graph read or write."""

    def __init__(self, graph: Any) -> None:
        captures = getattr(graph, "captures", ())
        self._device = {inner.ref(): str(outer.device) for outer, inner in captures}
        self._graph = graph

    def of(self, op: tf.Operation) -> list[str]:
        """Devices of the variables among an operation's inputs, each once."""
        handles = [i for i in op.inputs if i.dtype == tf.resource]
        return list(dict.fromkeys(self._device.get(i.ref(), i.device) for i in handles))
