"""Joining the processes that communicate, and leaving them.

Leaving needs care: a process that has its own result may still be the source of a message on its
way to another, and TensorFlow's runtime drops that message when the process ends. A barrier does
not help, as its own last messages are as exposed. So the first process leaves last: the others tell
it that they are done, wait for its answer, and take the end of its connection for an answer too.
"""

from __future__ import annotations

import atexit
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from kdist import _private_comm
from kdist.comm import processes
from kdist.comm.processes import TIMEOUT_SECONDS, Connection

import tensorflow as tf

_left = False


def connect(
    addresses: Sequence[str], index: int, timeout_seconds: float = TIMEOUT_SECONDS
) -> Connection:
    """Joins the processes that communicate. Call it after `kdist.init`, before the first tensor.

    It does not wait for the others; the first collective does. TensorFlow's servers listen on
    every network interface and ask for no password: keep the ports inside a trusted network. When
    the program ends, it waits for the others as `leave` does.

    Args:
        addresses: `host:port` of each process, the same list in each.
        index: which of them is this one.
        timeout_seconds: after which a message that does not come is an error.

    Returns:
        The connection. The devices of process i are `"/job:worker/task:i/device:CPU:0"`, ... in a
        mesh.

    Raises:
        ValueError: for addresses that are not distinct `host:port`, an index that does not exist,
            a timeout that is not positive, or if TensorFlow has started already.

    Example:
        >>> kdist.init(cpu_devices=1)
        >>> kdist.comm.connect(["127.0.0.1:4001", "127.0.0.1:4002"], index=0)
        >>> names = [f"/job:worker/task:{i}/device:CPU:0" for i in range(2)]
        >>> mesh = keras.distribution.DeviceMesh((2,), ["data"], names)
    """
    good = [bool(re.fullmatch(r"\S+:\d+", str(address))) for address in addresses]
    if isinstance(addresses, str) or not all(good) or len(set(addresses)) != len(addresses):
        raise ValueError(
            "The addresses are distinct texts 'host:port', one per process. "
            f"Received: addresses={addresses!r}"
        )
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(addresses):
        raise ValueError(
            f"The index of this process is an integer from 0 to {len(addresses) - 1}. "
            f"Received: index={index!r}"
        )
    processes.check_timeout(timeout_seconds)
    if processes.current() is not None or _private_comm.runtime_started():
        raise ValueError(
            "A process joins others once, before TensorFlow starts. Call kdist.comm.connect right "
            "after kdist.init, before any tensor, variable or layer is made. "
            f"Received: connected already={processes.current()}"
        )
    connection = Connection(tuple(addresses), index, float(timeout_seconds))
    processes.join(connection)
    atexit.register(_leave_at_exit)
    return connection


def leave(timeout_seconds: float | None = None) -> None:
    """Waits until every process has called it, so that none ends while another still reads from it.

    The last call of `kdist.comm` in a program. A program that ends without it makes it then, unless
    it ends by an exception: its peers should learn of that at once. Does nothing in a process that
    has not joined others or has left already, or after a `PeerError`.

    Args:
        timeout_seconds: how long to wait; by default the connection's. After that the process goes
            all the same, with a warning.

    Raises:
        ValueError: for a timeout that is not positive.

    Example:
        >>> kdist.comm.all_reduce([gradient], mesh, "data")
        >>> kdist.comm.leave()
    """
    global _left
    if timeout_seconds is not None:
        processes.check_timeout(timeout_seconds)
    connection = processes.current()
    if connection is None or _left or processes.failed():
        return
    _left = True
    limit = timeout_seconds or connection.timeout_seconds
    say_goodbye = _first_waits if connection.index == 0 else _others_ask
    try:
        tf.function(say_goodbye, autograph=False)(
            len(connection.addresses), connection.index, limit
        )
    except tf.errors.OpError as error:
        # The first process ends when it has answered: that the answer is cut off says the same.
        if connection.index and not isinstance(error, tf.errors.DeadlineExceededError):
            return
        warnings.warn(
            f"Process {connection.index} leaves before all others do, after at most {limit:g} s: "
            "their collectives with it will fail. Give kdist.comm.leave a longer timeout where the "
            f"others have more to do. Received: {type(error).__name__}",
            stacklevel=2,
        )


def _first_waits(count: int, index: int, limit: float) -> tf.Tensor:
    """Hears from every process, then answers each."""
    here, others = _device(index), [_device(task) for task in range(count) if task != index]
    with tf.device(here):
        heard = [
            processes.receive((1,), "int32", other, here, "leave", _name("from", other), limit)
            for other in others
        ]
        with tf.control_dependencies(heard):
            answered = [
                processes.send(_word(), here, other, "left", _name("to", other), limit)
                for other in others
            ]
    return _after(answered)


def _others_ask(count: int, index: int, limit: float) -> tf.Tensor:
    """Tells the first process, then waits for its answer."""
    del count
    here, first = _device(index), _device(0)
    with tf.device(here):
        told = processes.send(_word(), here, first, "leave", _name("to", first), limit)
        answer = processes.receive((1,), "int32", first, here, "left", _name("from", first), limit)
    return _after([told, answer])


def _word() -> tf.Tensor:
    return tf.zeros([1], tf.int32)


def _after(messages: Sequence[Any]) -> tf.Tensor:
    """A result that asks for the messages: TensorFlow prunes what nobody asks for."""
    with tf.control_dependencies(messages):
        return _word()


def _device(task: int) -> str:
    return f"/job:{processes.JOB}/task:{task}/device:CPU:0"


def _name(way: str, device: str) -> str:
    return processes.node_name("leave", "all", way, device, 0)


def _leave_at_exit() -> None:
    """At the end of the program; `sys.last_value` is the exception that ended it, if one did."""
    if getattr(sys, "last_value", None) is None:
        leave()
