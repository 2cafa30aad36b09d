"""Every use of TensorFlow internals behind `kdist.comm`, in one place.

TensorFlow 2.21 has no public way to do these; `tests/_compat/test_collective_runtime.py` and
`tests/comm/test_processes.py` fail when one moves.

- `record.record_operation`, `record.stop_recording`: a gradient for results on several devices.
  `tf.custom_gradient` joins them in one `IdentityN`, which runs on one device, so that every value
  would travel there and back.
- `record.should_record_backprop`: whether a tape would miss what is sent away.
- `Context.configure_collective_ops`, `enable_collective_ops`, `config`: this process becomes a
  member of a cluster. `tf.distribute.MultiWorkerMirroredStrategy` does the same, with a health
  check that ends the process and a strategy that nobody asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context, record


def record_gradient(
    name: str,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[..., Sequence[tf.Tensor | None]],
) -> None:
    """Tells the running gradient tapes how to go back from outputs to inputs.

    Args:
        name: Of the operation.
        outputs: Tensors that were computed outside of the tapes' sight (`unrecorded`).
        inputs: Tensors that they depend on.
        backward: From one gradient per output to one per input.
    """
    record.record_operation(name, list(outputs), list(inputs), backward)


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """A context in which gradient tapes see nothing."""
    return record.stop_recording()


def recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a running gradient tape watches one of some tensors."""
    return bool(record.should_record_backprop(list(tensors)))


def join_cluster(job: str, addresses: Sequence[str], index: int) -> None:
    """Starts this process's server, and the collective runtime on it.

    Args:
        job: Name of the job.
        addresses: `host:port` of each process.
        index: Which of them is this one.
    """
    running = context.context()
    running.configure_collective_ops(collective_leader=f"/job:{job}/replica:0/task:0")
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({job: list(addresses)}).as_cluster_def(),
        job_name=job,
        task_index=index,
        protocol="grpc",
        # With the logical devices, and with the leader that resolves groups.
        default_session_config=running.config,
    )
    running.enable_collective_ops(server)


def runtime_started() -> bool:
    """Whether TensorFlow has made its devices, after which no cluster can be joined."""
    return bool(context.context()._initialized)
