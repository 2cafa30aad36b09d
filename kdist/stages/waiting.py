"""What a stage's device has of all micro-batches while one of them runs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kdist.graphs.live_tensors import VIEWS
from kdist.pipeline.schedule import Beside, Schedule


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """What a virtual stage has on its device, in bytes.

    Attributes:
        computing: Of the micro-batch that it computes, at most.
        saved: Of one whose backward pass has not begun.
        put_off: Of one whose weight gradient is put off.
        returned: Of each, what it returns and metrics read, whenever they run.
        returned_too: What of that it has saved as well.
        sent: What goes to the next virtual stage, and stays here while that keeps it.
        gradients: What goes to the one before.
    """

    computing: int
    saved: int = 0
    put_off: int = 0
    returned: int = 0
    returned_too: int = 0
    sent: int = 0
    gradients: int = 0


def most_held(held: Sequence[StageMemory], schedule: Schedule, stage: int) -> int:
    """Bytes that a stage's device has at most, whichever of its chunks computes.

    Args:
        held: Per chunk of the stage.
        schedule: The schedule.
        stage: The stage.
    """
    beside, stages = schedule.kept_beside(), schedule.num_stages
    around = [_around(beside, stages, chunk * stages + stage) for chunk in range(len(held))]

    def there(chunk: int, one: Beside) -> int:
        found = held[chunk].computing
        for k, (mine, (begun, off)) in enumerate(zip(held, one)):
            own = k == chunk
            found += begun * mine.saved + off * mine.put_off
            found += (schedule.micro_batches - own) * mine.returned - begun * mine.returned_too
            after, before = around[k]
            found += (after - own) * mine.sent + before * mine.gradients
        return found

    return max(
        there(chunk, one) for chunk in range(len(held)) for one in beside[chunk * stages + stage]
    )


def _around(beside: Sequence[Iterable[Beside]], stages: int, virtual: int) -> tuple[int, int]:
    """Of how many micro-batches the next virtual stage has something, and gradients the one before.

    That is all that they keep, and the one that they compute.
    """

    def kept(other: int) -> list[tuple[int, int]]:
        there = 0 <= other < len(beside)
        return [one[other // stages] for one in beside[other]] if there else []

    after = 1 + max(map(sum, kept(virtual + 1)), default=0)
    before = 1 + max((off for _, off in kept(virtual - 1)), default=0)
    return after, before


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor, 0 if its shape is not known."""
    known = tensor.shape.is_fully_defined()
    return tensor.shape.num_elements() * (tensor.dtype.size or 0) if known else 0


def together(tensors: Iterable[Any], size: Callable[[Any], int] = nbytes) -> int:
    """Bytes of some tensors, of which views take none beside what they are of."""
    return sum(size(ref.deref()) for ref in dict.fromkeys(map(made_by, tensors)))


def owned(tensors: Iterable[Any], size: Callable[[Any], int] = nbytes) -> dict[str, int]:
    """By name of each tensor, its bytes; 0 of one that is a view, if another one has its buffer."""
    seen: set[Any] = set()
    found = {}
    for tensor in tensors:
        made = made_by(tensor)
        found[tensor.name] = 0 if made in seen else size(made.deref())
        seen.add(made)
    return found


def made_by(tensor: Any) -> Any:
    """The reference of what a tensor is a view of."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor.ref()
