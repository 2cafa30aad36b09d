"""What goes wrong between processes."""

from __future__ import annotations

from collections.abc import Sequence


class PeerError(RuntimeError):
    """Another process is missing, died, does not answer, or does something else.

    Args:
        message: What happened, and what to do.
        peers: Numbers of the processes that it happened to; of those that are waited for where
            that is all that is known.
        operation: The collective that failed, if it was one of `kdist.comm`.
        axis: The mesh axis it ran over.

    Attributes:
        peers, operation, axis: See the arguments.

    Example:
        >>> try:
        ...     model.fit(x, y)
        ... except kdist.comm.PeerError as error:
        ...     print("failed:", error.peers)
    """

    def __init__(
        self,
        message: str,
        peers: Sequence[int],
        operation: str | None = None,
        axis: str | None = None,
    ) -> None:
        self.peers, self.operation, self.axis = tuple(peers), operation, axis
        super().__init__(message)


def lost(process: int, count: int, address: str, cause: str) -> PeerError:
    """The error that a process has failed while the program ran.

    Args:
        process: Its number.
        count: Of processes.
        address: Of its server.
        cause: What happened to it.
    """
    return PeerError(
        f"Process {process} of {count} ({address}) {cause}. What it printed last says more. The "
        "program cannot go on without it: start all processes again; training goes on from its "
        "last checkpoint, see kdist.callbacks.ShardedCheckpoint.",
        [process],
    )
