"""Every use of TensorFlow's runtime for one program over several processes.

Process 0 runs the program; the others run a TensorFlow server, whose devices process 0 uses.
Documented: `tf.distribute.Server`, `tf.config.experimental_connect_to_cluster`. Not documented, and
held by `tests/cluster/test_joining.py`:

- `Server` makes the devices that its own configuration says, and not those that `tf.config` was
  told; `Context.config` is the latter as such a configuration. Its target is the address that it
  listens on, the port included that the system chose for port 0.
- An operation that Python runs on another process's device is over when Python goes on, if
  TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE is false. Otherwise it waits there for its turn, and a
  function called next does not wait for it: a step may read a weight before it is assigned.
- Whether operations are deterministic, and TensorFloat-32 is used, is a process's own: kernels ask
  for it as they run. `config.is_op_determinism_enabled` and `config.disable_op_determinism` are not
  in `tf.config`.
- A server shares its port with sockets that have SO_REUSEPORT where TF_GRPC_REUSE_PORT is set.
- A `MultiWorkerMirroredStrategy` of several workers starts a server in each of them, for
  collectives, and a coordination service with a table of texts. Other servers can be started beside
  its own, at other ports, and `use` works in a context that has one: what was made before can be
  read. (Joining its own servers, by `Context.update_server_def`, hangs.)
- Connections of TensorFlow's runtime are sockets of this process. When one breaks, calls that wait
  for it fail; a call to a process that is frozen ends in no other way (cancelling it does not).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import config

JOB = "worker"
_FILES = "/proc/self/fd"


def device_counts() -> dict[str, int]:
    """Devices that this process has, or will have, by kind: as `tf.config` was told."""
    return dict(context.context().config.device_count)


def kernel_settings() -> dict[str, bool]:
    """What `tf.config` keeps in a process, for all kernels that run there, and in no graph."""
    return {
        "deterministic": bool(config.is_op_determinism_enabled()),
        "tensor_float_32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    }


def set_kernels(deterministic: bool, tensor_float_32: bool) -> None:
    """Sets what `kernel_settings` of another process are."""
    switch = config.enable_op_determinism if deterministic else config.disable_op_determinism
    switch()
    tf.config.experimental.enable_tensor_float_32_execution(tensor_float_32)


def serve(process: int, host: str, port: int) -> int:
    """Starts this process's server, which ends with the process.

    TensorFlow's server listens on every interface, and does what it is asked by whoever asks.

    Args:
        process: Number of this process.
        host: By which others reach it.
        port: To listen on; 0 for a free one.

    Returns:
        The port.
    """
    told = context.context().config
    own = tf.compat.v1.ConfigProto(
        device_count=told.device_count,
        gpu_options=told.gpu_options,
        intra_op_parallelism_threads=told.intra_op_parallelism_threads,
        inter_op_parallelism_threads=told.inter_op_parallelism_threads,
    )
    cluster = tf.train.ClusterSpec({JOB: {process: f"{host}:{port}"}})
    server = tf.distribute.Server(
        cluster, job_name=JOB, task_index=process, protocol="grpc", config=own
    )
    return int(server.target.rpartition(":")[2])


def reserve(port: int) -> int:
    """Keeps a port for `use`, which starts this process's server later.

    Args:
        port: 0 for a free one.

    Returns:
        The port.

    Raises:
        OSError: It is taken.
    """
    held = socket.socket()
    # The server may take what is held by this user's sockets with this option, nothing else may.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    held.bind(("", port))
    given = int(held.getsockname()[1])
    held.detach()  # open for as long as the process lives
    return given


def use(addresses: Sequence[str]) -> None:
    """Makes the devices of all processes this process's, which is the first of them.

    Args:
        addresses: `host:port` of each process's server; this one's starts here.
    """
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "false"  # see above
    if strategy_job() is not None:
        _use_beside_strategy(addresses)
        return
    with _logging_untouched():
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec({JOB: list(addresses)}),
            job_name=JOB,
            task_index=0,
            protocol="grpc",
            make_master_device_default=False,
        )


@contextlib.contextmanager
def _logging_untouched() -> Iterator[None]:
    """Keeps absl, which TensorFlow connects with, from giving the root logger a handler.

    With one, TensorFlow's warnings are printed twice, and `logging.basicConfig` does nothing.
    """
    stand_in = logging.NullHandler()
    logging.root.addHandler(stand_in)
    try:
        yield
    finally:
        logging.root.removeHandler(stand_in)


def _use_beside_strategy(addresses: Sequence[str]) -> None:
    """The same in a context that has a server, without what belongs to that one's cluster.

    With its coordination service, the others' servers would never answer.
    """
    running = context.context()
    server = tensorflow_server_pb2.ServerDef(job_name=JOB, task_index=0, protocol="grpc")
    server.cluster.CopyFrom(tf.train.ClusterSpec({JOB: list(addresses)}).as_cluster_def())
    server.default_session_config.CopyFrom(running.config)
    for field in ("coordination_config", "collective_group_leader"):
        server.default_session_config.experimental.ClearField(field)
    del server.default_session_config.device_filters[:]
    running.set_server_def(server)


def has_started() -> bool:
    """Whether TensorFlow has made its devices, after which no process can be joined."""
    return bool(context.context()._initialized)


def strategy_job() -> str | None:
    """This process's job in the cluster of a strategy that has started servers, if one has."""
    server = context.context()._collective_ops_server_def
    return None if server is None else str(server.job_name)


def say_to_strategy_cluster(name: str, text: str) -> None:
    """Puts a text where the other processes of a strategy find it."""
    context.context().set_config_key_value(name, text)


def heard_in_strategy_cluster(name: str, seconds: float) -> str:
    """What a process of a strategy has said, or says within some time.

    Raises:
        TimeoutError: None did.
    """
    try:
        return str(context.context().get_config_key_value(name, int(1000 * seconds)))
    except tf.errors.OpError as error:
        raise TimeoutError(str(error).split("\n", maxsplit=1)[0]) from error


def cut_connections(addresses: Collection[tuple[str, int]]) -> int:
    """Ends this process's connections to some addresses; returns how many there were.

    Args:
        addresses: (IP address, port) of each.
    """
    found = 0
    for name in os.listdir(_FILES) if os.path.isdir(_FILES) else ():
        with contextlib.suppress(OSError):
            if not os.readlink(f"{_FILES}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                peer: Any = one.getpeername()
                if not isinstance(peer, tuple):
                    continue
                # gRPC's sockets speak both versions of IP.
                if (peer[0].removeprefix("::ffff:"), peer[1]) in addresses:
                    one.shutdown(socket.SHUT_RDWR)
                    found += 1
    return found


def process_of(error: BaseException) -> int | None:
    """The one process besides this one that an error of TensorFlow names, if it names one."""
    if not isinstance(error, tf.errors.OpError):
        return None
    named = set(re.findall(rf"/job:{JOB}/replica:0/task:(\d+)", str(error))) - {"0"}
    return int(named.pop()) if len(named) == 1 else None


def lacks_python(error: BaseException) -> bool:
    """Whether a Python function of this process was called in another one, which has none."""
    return isinstance(error, tf.errors.OpError) and "Could not find callback with key" in str(error)


def may_be_a_process(error: BaseException | None) -> bool:
    """Whether an error of TensorFlow may come of a process that failed."""
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.CancelledError,
        tf.errors.AbortedError,
        tf.errors.InternalError,
        tf.errors.UnknownError,
        tf.errors.DeadlineExceededError,
    )
    return isinstance(error, kinds)
