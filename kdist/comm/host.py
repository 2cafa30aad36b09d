"""What a collective costs where all devices are CPU devices of one process.

There a message is a pointer: nothing travels. What takes time is the call itself, handing tensors
from device to device, starting operations, and the bytes that operations read and write. Devices
share the cores and the memory, so it is totals that count and not the longest chain of messages:
one core can saturate the memory that all share. The totals are counted in the graph of the
collective itself; making a graph touches no device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kdist.comm import collectives, ordered
from kdist.comm.cost import LinkCost
from kdist.comm.group import Group

import tensorflow as tf

GIVEN = frozenset({"Placeholder", "ReadVariableOp"})
"""Operations that hand out a buffer which is there already."""
FREE = frozenset({*GIVEN, "Const", "Identity", "Reshape", "NoOp", "AssignVariableOp"})
"""Operations that are gone, or nothing but a pointer, when the graph runs."""
VIEWS = frozenset({"Split", "SplitV"})
"""Operations that copy nothing: their results are parts of their input, along dim 0."""
ELEMENTS = 64
"""Of a part that a device has for another one, in the graph that is counted."""


@dataclasses.dataclass(frozen=True)
class HostWork:
    """What a program does, all devices together.

    Attributes:
        transfers: Tensors handed from a device to another.
        operations: Operations that run.
        moved: Bytes that they read and write.
        footprint: Bytes of all buffers, those that are given included.
    """

    transfers: int
    operations: int
    moved: float
    footprint: float

    def times(self, factor: float) -> HostWork:
        """The same program on buffers of another size."""
        return dataclasses.replace(
            self, moved=self.moved * factor, footprint=self.footprint * factor
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCost(LinkCost):
    """What work costs in one process: constants of a machine and a number of devices.

    Attributes:
        a: Seconds per transfer.
        b: Seconds per byte that an operation reads from memory or writes there.
        call: Seconds of a program that does nothing.
        operation: Seconds to start an operation.
        cached: Seconds per byte that is in a cache.
        cache: Bytes of the caches: of a larger footprint that part is found there.
        devices: Number of devices that the constants were measured with; `call` grows with it.

    Example:
        >>> link = kdist.comm.calibrate(sizes=(1 << 12, 1 << 16), iterations=2)
        >>> kdist.comm.predict("all_reduce", "ring", 64e6, 8, link)
    """

    call: float = 0.0
    operation: float = 0.0
    cached: float = 0.0
    cache: float = 1.0
    devices: int = 1

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of what is measured."""
        return ("call", "a", "operation", "b", "cached", "cache")

    def seconds(self, operation: str, algorithm: str, nbytes: float, p: int) -> float:
        """See `kdist.comm.predict`."""
        return self.of(work(operation, algorithm, p).times(nbytes)) if p > 1 else 0.0

    def of(self, done: HostWork) -> float:
        """Seconds of some work."""
        constants = (self.call, self.a, self.operation, self.b, self.cached)
        return sum(c * part for c, part in zip(constants, parts(done, self.cache)))

    def __str__(self) -> str:
        error = "" if self.error is None else f", median error {self.error:.0%}"
        return (
            f"call {self.call * 1e6:.0f} us, transfer {self.a * 1e6:.1f} us, "
            f"operation {self.operation * 1e6:.1f} us, byte {self.b * 1e9:.3f} ns "
            f"({self.cached * 1e9:.3f} ns in {self.cache / 2**20:.0f} MB of cache){error}"
        )


def parts(done: HostWork, cache: float) -> tuple[float, ...]:
    """What each constant counts: calls, transfers, operations, bytes in memory, bytes in caches."""
    found = min(1.0, cache / max(done.footprint, 1.0))
    return 1, done.transfers, done.operations, done.moved * (1 - found), done.moved * found


@functools.lru_cache(maxsize=1024)
def work(operation: str, algorithm: str, p: int) -> HostWork:
    """What a collective does per byte of the full buffer, as `cost.predict` takes it.

    Args:
        operation: One of `algorithms.OPERATIONS`.
        algorithm: One of `algorithms.ALGORITHMS`.
        p: Number of devices.
    """
    devices = tuple(f"/device:CPU:{k}" for k in range(p))
    ranks = tuple(range(p))
    group = Group(axis="data", devices=devices, rows=(ranks,), local=ranks)
    length = ELEMENTS * p
    own = ELEMENTS if operation in ("gather", "all_gather") else length
    function = getattr(ordered if operation == "scan" else collectives, operation)
    graph = tf.Graph()
    with graph.as_default():
        values = []
        for device in devices:
            with tf.device(device):
                values.append(tf.compat.v1.placeholder(tf.float32, [own]))
        function(values, group, algorithm=algorithm)
    return count(graph).times(1 / (length * tf.float32.size))


def count(graph: tf.Graph) -> HostWork:
    """Counts what a graph does; every operation is placed, and every size known.

    Operations that compute the same from the same tensors count once: TensorFlow merges them.
    """
    nodes = _distinct(graph)
    buffers = [node for node in nodes if node.type not in FREE | VIEWS]
    given = [node for node in nodes if node.type in GIVEN]
    return HostWork(
        transfers=sum(n.type == "Identity" and n.inputs[0].device != n.device for n in nodes),
        operations=sum(node.type not in FREE for node in nodes),
        moved=sum(_nbytes(node.inputs) + _nbytes(node.outputs) for node in buffers),
        footprint=sum(_nbytes(node.outputs) for node in (*buffers, *given)),
    )


def _distinct(graph: tf.Graph) -> list[tf.Operation]:
    """The operations of a graph, each only once of those that are the same."""
    first: dict[Any, tf.Operation] = {}
    known: dict[str, str] = {}
    for node in graph.get_operations():
        inputs = tuple((known[tensor.op.name], tensor.value_index) for tensor in node.inputs)
        definition = node.node_def
        definition.name = node.name if node.type in GIVEN | {"AssignVariableOp"} else ""
        del definition.input[:]
        same = first.setdefault((definition.SerializeToString(deterministic=True), inputs), node)
        known[node.name] = same.name
    return list(first.values())


def _nbytes(tensors: list[tf.Tensor]) -> int:
    # Handles of variables, and axes to join along, are no data.
    sized = [t for t in tensors if t.shape.rank and t.dtype != tf.resource]
    return sum(t.shape.num_elements() * t.dtype.size for t in sized)
