"""Re-layouts within a trace: what layers and `kdist.shard` ask for, and the running trace answers.

Layers are below the engine that traces them. It says here, for the time of a trace, how a tensor is
laid out; without a trace a tensor stays as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Relayout = Callable[..., Any]
"""Takes a tensor, a strategy, the tensor's name for notes, and `batch_dim`; see `relaid`."""


class _Running(threading.local):
    """How the running traces of one thread lay tensors out, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Relayout] = []


_running = _Running()


@contextlib.contextmanager
def laying_out(relayout: Relayout) -> Iterator[None]:
    """Makes `relaid` call `relayout`, in this thread, within the block."""
    _running.stack.append(relayout)
    try:
        yield
    finally:
        _running.stack.pop()


def relaid(
    tensor: Any, strategy: Sequence[Any], what: str = "a tensor", *, batch_dim: bool = True
) -> Any:
    """A tensor laid out as declared if a program is being traced; else the tensor as it is.

    Args:
        tensor: A tensor of any rank from that of the strategy on.
        strategy: One entry a dim: names or cut counts, see `kdist.sharding.strategy`.
        what: The tensor's name, for notes.
        batch_dim: Whether dim 0 is the batch, as `parse_strategy` reads it.

    Raises:
        ValueError: If the strategy has more entries than the tensor dims, or does not parse.
    """
    if not _running.stack:
        return tensor
    return _running.stack[-1](tensor, strategy, what, batch_dim=batch_dim)
