"""A function in the workers of Ray Train: it runs in the first one, the others serve it."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from kdist._compat import ray_train
from kdist.cluster import joining, output, server
from kdist.cluster.place import joined_address


def in_workers(train_fn: Callable[..., Any]) -> Callable[..., Any]:
    """What each worker runs: it tells `kdist.init` its place, and ends as the first one ends.

    Args:
        train_fn: Calls `kdist.init`, and trains; with or without one argument.
    """

    @functools.wraps(train_fn)  # Ray looks at its arguments
    def run(*config: Any) -> Any:
        import ray.train

        context = ray.train.get_context()
        process, count = context.get_world_rank(), context.get_world_size()
        if count < 2:
            return train_fn(*config)
        os.environ.update(_place(process, count))
        server.CALLS.update(ray_train.calls_of_all())
        if process == 0:
            ray_train.tell_before(joining.call_in_others)
        try:
            result = train_fn(*config)
        except server.Served:
            # Of how the first worker ended, Ray hears from itself.
            return None
        except BaseException as error:
            joining.finish(1, output.described(error))
            raise
        if not joining.has_joined():
            raise RuntimeError(
                "The function that kdist.ray.Trainer runs calls kdist.init() before all else: it "
                "makes one program of the workers, which trained apart from each other here. "
                f"Received: {count} workers and {getattr(train_fn, '__name__', train_fn)!r}, "
                "which ended without such a call"
            )
        joining.finish(0)
        return result

    return run


def _place(process: int, count: int) -> dict[str, str]:
    """The variables that tell this worker its place; the first worker says where all meet."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    said = None
    if process == 0:
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            said = (joined_address(host, free.getsockname()[1]), secrets.token_hex(16))
    coordinator, token = broadcast_from_rank_zero(said)
    return {
        "KDIST_COORDINATOR": coordinator,
        "KDIST_NUM_PROCESSES": str(count),
        "KDIST_PROCESS_ID": str(process),
        "KDIST_TOKEN": token,
    }
