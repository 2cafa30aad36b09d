"""Messages between processes, on TensorFlow's collective runtime.

A message is a broadcast of two members (`CollectiveBcastSendV2` and `CollectiveBcastRecvV2`):
the runtime's own point-to-point route, gRPC on CPU. What makes that safe:

- Group and instance keys are hashes of what is communicated, between whom, and of the shape, in a
  range of kdist's own: the runtime binds a key to a shape for the life of the process, and every
  process finds the same key without asking.
- Collectives of a function run one after the other (`lane`), in the order of the program, which is
  the same everywhere; the messages of one collective run as their data arrives. Without the first,
  two processes could wait for each other; with the second, a ring cannot.
- The lane is a variable that changes after each collective, so that TensorFlow does not prune a
  send that nobody in this process uses. A backward pass that TensorFlow derives from a graph keeps
  and orders nothing by itself: results wait for the sends, and keys count a graph's collectives.
- `send` and `recv` apart, of which other processes know nothing, take no turn.
- Every message has a timeout.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
import socket
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence

from kdist._compat import collective_runtime
from kdist.cluster.errors import PeerError
from kdist.cluster.joining import naming_failures
from kdist.sharding.mesh import Device

import tensorflow as tf

JOB = "worker"
TIMEOUT_SECONDS = 60.0
SHORTEST_SECONDS = 1e-3
# Keys from here on are kdist's; tf.distribute counts its own up from small numbers.
_KEYS_FROM = 1 << 30
_PAIR = 2
# What the runtime carries; others travel as the same bits, or inside a wider integer.
_CARRIED = ("float16", "float32", "float64", "int32", "int64")
_CARRIER = {"int8": "int32", "uint8": "int32", "int16": "int32", "uint16": "int32"}
_CARRIER |= {"uint32": "int64", "uint64": "int64", "bfloat16": "float16"}
_SAME_BITS = ("uint64", "bfloat16")
_NODE = re.compile(r"kdist_comm/(?P<operation>\w+)/axis_(?P<axis>\w+?)/(?P<rest>[\w/]+)")
# A process that dies closes its connections before its port.
_DYING_SECONDS = 0.5
_TOLD = re.compile(r"Collective ops|[Tt]imed? ?out|[Dd]eadline")
_PEER = re.compile(r"(?:from|to)_task_(\d+)")


def _failed_collective(operation: str, axis: str, peers: Sequence[int], cause: str) -> PeerError:
    names = ", ".join(f"/job:{JOB}/task:{task}" for task in peers) or "a peer"
    return PeerError(
        f"{operation} over axis {axis!r} failed, waiting for {names}: {cause} Check that every "
        "process of the mesh runs, and calls the same collectives with the same shapes in the same "
        "order. TensorFlow's collective runtime does not recover: start this process again.",
        peers,
        operation,
        axis,
    )


@dataclasses.dataclass(frozen=True)
class Connection:
    """This process's place among all.

    Attributes:
        addresses: `host:port` of each process.
        index: Which of them is this one.
        timeout_seconds: After which a message that does not come is an error.
        job: Name of the job in device names.

    Example:
        >>> here = kdist.comm.Connection(("10.0.0.1:4001", "10.0.0.2:4001"), index=1)
        >>> here.timeout_seconds
        60.0
    """

    addresses: tuple[str, ...]
    index: int
    timeout_seconds: float = TIMEOUT_SECONDS
    job: str = JOB


_connection: Connection | None = None
_failed = False
# Of each graph, collectives, and messages of a pair, so far: a number makes keys their own.
_Numbers = weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]]
_numbers: _Numbers = weakref.WeakKeyDictionary()
_turns: dict[str, tf.Variable] = {}
_described: dict[int, str] = {}


def join(connection: Connection) -> None:
    """Makes this process a member; `membership.connect` has checked that it may."""
    global _connection
    collective_runtime.join_cluster(connection.job, connection.addresses, connection.index)
    _connection = connection


def current() -> Connection | None:
    """The connection of this process, None where it is alone."""
    return _connection


def failed() -> bool:
    """Whether a collective of this process has failed, after which the runtime does nothing."""
    return _failed


def check_timeout(seconds: float) -> None:
    """Refuses a timeout that is none; the runtime rounds to microseconds and takes 0 for none."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds < SHORTEST_SECONDS:
        raise ValueError(
            f"A timeout is a finite number of seconds, {SHORTEST_SECONDS:g} or more: without one, "
            f"a missing peer hangs the others for ever. Received: timeout_seconds={seconds!r}"
        )


def check_members(devices: Sequence[str]) -> None:
    """Refuses devices of processes that this one is not connected with."""
    tasks = range(len(_connection.addresses)) if _connection else ()
    strangers = [
        name
        for name in devices
        if Device.parse(name).process[0] != JOB or Device.parse(name).process[1] not in tasks
    ]
    if strangers:
        raise ValueError(
            f"The mesh has devices of processes that this one does not know: {strangers}. Call "
            "kdist.comm.connect(addresses, index) after kdist.init, with an address per process. "
            f"Received: connection={_connection}"
        )


def node_name(operation: str, axis: str, way: str, device: str, number: int) -> str:
    """Name of a message's operation in the graph; errors of TensorFlow show it."""
    _, task = Device.parse(device).process
    return f"kdist_comm/{operation}/axis_{axis}/{way}_task_{task}/round_{number}"


def send(
    value: tf.Tensor, source: str, target: str, about: str, name: str, timeout: float
) -> tf.Operation:
    """Starts a message to a device of another process; call it in the scope of the source."""
    carried = _to_carrier(value)
    return tf.raw_ops.CollectiveBcastSendV2(
        input=carried,
        **_keys(source, target, about, carried.dtype.name, carried.shape),
        timeout_seconds=timeout,
        name=name,
    ).op


def receive(
    shape: Sequence[int],
    dtype: str,
    source: str,
    target: str,
    about: str,
    name: str,
    timeout: float,
) -> tf.Tensor:
    """Takes a message of a device of another process; call it in the scope of the target."""
    carrier = _CARRIER.get(dtype, dtype)
    arrived = tf.raw_ops.CollectiveBcastRecvV2(
        T=carrier,
        shape=list(shape),
        **_keys(source, target, about, carrier, shape),
        timeout_seconds=timeout,
        name=name,
    )
    arrived = tf.ensure_shape(arrived, shape)
    return tf.bitcast(arrived, dtype) if dtype in _SAME_BITS else tf.cast(arrived, dtype)


def reduce_all(
    value: tf.Tensor,
    merge: str,
    members: Sequence[str],
    about: str,
    name: str,
    timeout: float,
) -> tf.Tensor:
    """TensorFlow's own all-reduce, over one device of each of several processes."""
    shape = tuple(value.shape)
    text = f"{about}|{merge}|{value.dtype.name}|{shape}"
    return tf.raw_ops.CollectiveReduceV2(
        input=value,
        group_size=len(members),
        group_key=_key("group|" + "|".join(members)),
        instance_key=_key(text),
        ordering_token=[],
        merge_op=merge,
        final_op="Id",
        timeout_seconds=timeout,
        name=name,
    )


def _to_carrier(value: tf.Tensor) -> tf.Tensor:
    name = value.dtype.name
    if name in _CARRIED:
        return value
    change = tf.bitcast if name in _SAME_BITS else tf.cast
    return change(value, _CARRIER[name])


def _keys(source: str, target: str, about: str, dtype: str, shape: Sequence[int]) -> dict[str, int]:
    return {
        "group_size": _PAIR,
        "group_key": _key(f"pair|{source}|{target}"),
        "instance_key": _key(f"{about}|{source}|{target}|{dtype}|{tuple(shape)}"),
    }


def _key(text: str) -> int:
    """A number from kdist's range for a text; the same in every process."""
    key = _KEYS_FROM + zlib.crc32(text.encode()) % _KEYS_FROM
    known = _described.setdefault(key, text)
    if known != text:
        raise ValueError(
            "Two communications got the same key in TensorFlow's collective runtime. Change the "
            f"shape or the order of one, or name the axis otherwise. Received: {known!r} and "
            f"{text!r}"
        )
    return key


def number_in_graph(what: str = "collectives") -> int:
    """How many of something the graph being traced had before this one."""
    numbers = _numbers.setdefault(tf.compat.v1.get_default_graph(), collections.Counter())
    numbers[what] += 1
    return numbers[what] - 1


@contextlib.contextmanager
def lane(started: list[tf.Operation]) -> Iterator[None]:
    """One collective's turn: after the one before it in the program, before the next.

    Args:
        started: The operations that the turn must not end before; filled inside.
    """
    with tf.control_dependencies([_turn("lane").read_value()]):
        yield
    with tf.control_dependencies(started):
        _turn("lane").assign_add(1)


@contextlib.contextmanager
def kept(started: list[tf.Operation]) -> Iterator[None]:
    """Messages without a turn: they go as their data is there, and none is pruned.

    Args:
        started: The operations to keep; filled inside.
    """
    yield
    with tf.control_dependencies(started):
        _turn("kept").assign_add(1)


def _turn(name: str) -> tf.Variable:
    if name not in _turns:
        with tf.init_scope(), tf.device("CPU:0"):
            _turns[name] = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"kdist_{name}")
    return _turns[name]


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Turns an error of TensorFlow's runtime into one that names the process that failed.

    Eager collectives do it themselves; put it around calls of your own `tf.function`.

    Raises:
        PeerError: Instead of TensorFlow's error, where a message of `kdist.comm` failed, or, after
            `kdist.init`, a process.

    Example:
        >>> mesh = kdist.mesh(data=2)
        >>> step = tf.function(lambda one: kdist.comm.all_reduce([one, one], mesh, "data"))
        >>> with kdist.comm.named_errors():
        ...     results = step(tf.constant(1.0))
    """
    global _failed
    try:
        with naming_failures():
            yield
    except tf.errors.OpError as error:
        found = _NODE.search(error.message)
        if found is None or _connection is None:
            raise
        _failed = True
        silent = silent_peers(_connection)
        if not silent and not isinstance(error, tf.errors.DeadlineExceededError):
            time.sleep(_DYING_SECONDS)
            silent = silent_peers(_connection)
        waited = [int(task) for task in _PEER.findall(found["rest"])]
        reason = "no answer at its address." if silent else _reason(error)
        raise _failed_collective(
            found["operation"], found["axis"], silent or waited, reason
        ) from error


def _reason(error: tf.errors.OpError) -> str:
    """What went wrong, without the places in the program that TensorFlow lists before."""
    lines = [line.strip() for line in error.message.splitlines()]
    told = [line for line in lines if _TOLD.search(line) and not line.startswith(("File ", "{{"))]
    return f"{type(error).__name__}: {told[0] if told else error.message[:200]}"


def local_addresses(count: int) -> list[str]:
    """Addresses on this machine for processes that are started next: ports free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


def silent_peers(connection: Connection) -> list[int]:
    """The other processes whose address nobody listens on."""
    silent = []
    for task, address in enumerate(connection.addresses):
        if task == connection.index:
            continue
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            silent.append(task)
    return silent
