"""What other micro-batches have on a stage's device while one of them runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kdist.graphs.live_tensors import VIEWS


def waiting(
    saved: Sequence[Any],
    put_off: Sequence[Any],
    outputs: Sequence[Any],
    beside: Iterable[tuple[int, int]],
    micro_batches: int,
    size: Callable[[Any], int] | None = None,
) -> int:
    """Bytes of what other micro-batches keep.

    Args:
        saved: What a micro-batch keeps for its backward pass.
        put_off: What it keeps for its weight gradient, if that is put off.
        outputs: What it returns and metrics read, whenever they run.
        beside: See `Schedule.kept_beside`.
        micro_batches: How many there are.
        size: Bytes of a tensor; by default `nbytes`.
    """
    size = size or nbytes
    held = {_made(t).ref() for t in saved}
    whole, half = together(saved, size), together(put_off, size)

    def kept(begun: int, off: int) -> int:
        lasting = sum(
            size(t) * (micro_batches - (begun + 1 if _made(t).ref() in held else 1))
            for t in outputs
        )
        return begun * whole + off * half + lasting

    return max(kept(*one) for one in beside)


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor, 0 if its shape is not known."""
    known = tensor.shape.is_fully_defined()
    return tensor.shape.num_elements() * (tensor.dtype.size or 0) if known else 0


def together(tensors: Iterable[Any], size: Callable[[Any], int] = nbytes) -> int:
    """Bytes of some tensors, of which views take none beside what they are of."""
    return sum(map(size, {(made := _made(t)).ref(): made for t in tensors}.values()))


def owned(tensors: Iterable[Any], size: Callable[[Any], int] = nbytes) -> dict[str, int]:
    """By name of each tensor, its bytes; 0 of one that is a view, if another one has its buffer."""
    seen: set[Any] = set()
    found = {}
    for tensor in tensors:
        made = _made(tensor)
        found[tensor.name] = 0 if made.ref() in seen else size(made)
        seen.add(made.ref())
    return found


def _made(tensor: Any) -> Any:
    """What a tensor is a view of."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor
