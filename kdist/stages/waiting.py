"""What other micro-batches have on a stage's device while one of them runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kdist.graphs.live_tensors import VIEWS


def waiting(
    saved: Sequence[Any],
    outputs: Sequence[Any],
    sent: Sequence[Any],
    live: int,
    micro_batches: int,
    size: Callable[[Any], int] | None = None,
) -> int:
    """Bytes of what other micro-batches keep.

    Args:
        saved: What a micro-batch keeps for its backward pass.
        outputs: What it returns and metrics read, whenever they run.
        sent: Gradients that it sends to the stage before, where the last may not have arrived.
        live: Micro-batches that wait for their backward pass at a time.
        micro_batches: How many there are.
        size: Bytes of a tensor; by default `nbytes`.
    """
    size = size or nbytes
    held = {_made(t).ref() for t in saved}
    lasting = sum(
        size(t) * (micro_batches - (live if _made(t).ref() in held else 1)) for t in outputs
    )
    return (live - 1) * together(saved, size) + lasting + together(sent, size)


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor, 0 if its shape is not known."""
    known = tensor.shape.is_fully_defined()
    return tensor.shape.num_elements() * (tensor.dtype.size or 0) if known else 0


def together(tensors: Iterable[Any], size: Callable[[Any], int] = nbytes) -> int:
    """Bytes of some tensors, of which views take none beside what they are of."""
    return sum(map(size, {(made := _made(t)).ref(): made for t in tensors}.values()))


def _made(tensor: Any) -> Any:
    """What a tensor is a view of."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor
