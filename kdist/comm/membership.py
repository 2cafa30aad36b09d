"""Joining the processes that communicate, and leaving them.

Leaving needs care: a process that has its own result may still be the source of a message on its
way to another, and TensorFlow's runtime drops that message when the process ends. A barrier does
not help, as its own last messages are as exposed. So the first process leaves last: the others tell
it that they are done, wait for its answer, and take the end of its connection for an answer too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kdist._compat import collective_runtime
from kdist.cluster.joining import controller
from kdist.comm import processes
from kdist.comm.processes import TIMEOUT_SECONDS, Connection
from kdist.display.warn import warn

import tensorflow as tf

# What the runtime raises where a peer's connection breaks.
_ENDED = (tf.errors.UnavailableError, tf.errors.CancelledError, tf.errors.AbortedError)
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
        index: Which of them is this one.
        timeout_seconds: After which a message that does not come is an error.

    Returns:
        The connection. The devices of process i are `"/job:worker/task:i/device:CPU:0"`, ... in a
        mesh.

    Raises:
        ValueError: For addresses that are not distinct `host:port`, an index that does not exist,
            a timeout that is not finite or below a millisecond, or if TensorFlow has started
            already, or kdist.init has joined several processes.

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
    if (joined := controller()) is not None:
        raise ValueError(
            "kdist.init has joined the processes of this program, and process 0 runs it alone: its "
            "steps send what others need by themselves. kdist.comm.connect is for scripts that run "
            "in each process, which call kdist.init(num_processes=1). Leave one of both out. "
            f"Received: kdist.init joined {joined.place.count} processes"
        )
    if processes.current() is not None or collective_runtime.runtime_started():
        raise ValueError(
            "A process joins others once, before TensorFlow starts. Call kdist.comm.connect right "
            "after kdist.init, before any tensor, variable or layer is made. "
            f"Received: connected already={processes.current()}"
        )
    connection = Connection(tuple(addresses), index, float(timeout_seconds))
    processes.join(connection)
    atexit.register(_leave_at_exit, os.getpid())
    return connection


def leave(timeout_seconds: float | None = None) -> None:
    """Waits until every process has called it, so that none ends while another still reads from it.

    The last call of `kdist.comm` in a program. A program that ends without it makes it then, unless
    it ends by an uncaught exception: peers that wait for it should learn of that at once
    (`sys.exit` counts as a normal end, whatever its code). Does nothing in a process that has not
    joined others or has left already, or after a `PeerError`. The end of the first process ends the
    waiting of all.

    Args:
        timeout_seconds: How long to wait; by default the connection's. After that the process goes
            all the same, with a warning.

    Raises:
        ValueError: For a timeout that is not finite, or below a millisecond.

    Example:
        >>> total = kdist.comm.all_reduce([tf.constant(1.0)], kdist.mesh(data=1), "data")
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
    others = [task for task in range(len(connection.addresses)) if task != connection.index]
    try:
        if connection.index:
            _ask_the_first(connection.index, limit)
        elif others:
            _answer_all(others, limit)
    except tf.errors.OpError as error:
        silent = processes.silent_peers(connection)
        advice = "Give kdist.comm.leave a longer timeout where the others have more to do."
        if silent:
            advice = f"No answer from task {', '.join(map(str, silent))}: see why it ended."
        warn(
            f"Process {connection.index} leaves before all others do, after at most {limit:g} s: "
            f"their collectives with it will fail. {advice} Received: {type(error).__name__}"
        )


def _answer_all(others: Sequence[int], limit: float) -> None:
    """What the first process does: hears from every other one, then answers each."""
    here, there = _device(0), [_device(task) for task in others]

    def hear() -> tf.Tensor:
        with tf.device(here):
            return _after(_heard(peer, here, "leave", limit) for peer in there)

    def answer(seconds: float) -> tf.Tensor:
        with tf.device(here):
            return _after(_told(here, peer, "left", seconds) for peer in there)

    started = time.monotonic()
    tf.function(hear, autograph=False)()
    left = max(limit - (time.monotonic() - started), processes.SHORTEST_SECONDS)
    # All have said that they are done: who does not take the answer has gone.
    with contextlib.suppress(tf.errors.OpError):
        tf.function(answer, autograph=False)(left)


def _ask_the_first(index: int, limit: float) -> None:
    """What each other process does: tells the first, then waits for its answer."""
    here, first = _device(index), _device(0)

    def ask() -> tf.Tensor:
        with tf.device(here):
            return _after([_told(here, first, "leave", limit), _heard(first, here, "left", limit)])

    # The first process ends when it has answered: a connection that breaks says the same.
    with contextlib.suppress(*_ENDED):
        tf.function(ask, autograph=False)()


def _told(here: str, peer: str, what: str, limit: float) -> tf.Operation:
    name = processes.node_name("leave", "all", "to", peer, 0)
    return processes.send(tf.zeros([1], tf.int32), here, peer, what, name, limit)


def _heard(peer: str, here: str, what: str, limit: float) -> tf.Tensor:
    name = processes.node_name("leave", "all", "from", peer, 0)
    return processes.receive((1,), "int32", peer, here, what, name, limit)


def _after(messages: Iterable[Any]) -> tf.Tensor:
    """A result that asks for the messages: TensorFlow prunes what nobody asks for."""
    with tf.control_dependencies(list(messages)):
        return tf.constant(0)


def _device(task: int) -> str:
    return f"/job:{processes.JOB}/task:{task}/device:CPU:0"


def _leave_at_exit(process: int) -> None:
    """At the end of the program; `sys.last_value` is the exception that ended it, if one did.

    In a prompt (`sys.ps1`) it is one that was shown on the way.

    Args:
        process: The one that joined; its forks have not.
    """
    if os.getpid() != process:
        return
    if hasattr(sys, "ps1") or getattr(sys, "last_value", None) is None:
        leave()
