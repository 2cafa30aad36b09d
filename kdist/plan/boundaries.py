"""What stages of a pipeline send to each other: activations forward, their gradients back. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses from one virtual stage to the next.

    Attributes:
        name: Its name in the model's graph.
        shape: Of a row of the batch, with None for dims of unknown size.
        itemsize: Bytes of an element.
        floating: Whether it has a gradient of its own, which comes back.
    """

    name: str
    shape: tuple[int | None, ...]
    itemsize: int
    floating: bool

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row; None if a dim is unknown."""
        sizes = [size for size in self.shape if size is not None]
        return math.prod(sizes) * self.itemsize if len(sizes) == len(self.shape) else None


@dataclasses.dataclass(frozen=True)
class BoundaryTraffic:
    """What one virtual stage sends to the next in a step, and gets back from it.

    Over inner axes each device sends what it has to its counterpart: all of a tensor, or a part if
    the layout there cuts it, which is known once the step is traced. Masks, where layers make some,
    come on top.

    Attributes:
        source: The stage that sends forward.
        target: The stage that sends back.
        tensors: What crosses.
        messages: Tensors sent, in both directions, by all replicas, micro-batches and devices.
        copies: Devices of a slice, each of which sends at most a whole tensor.
    """

    source: int
    target: int
    tensors: tuple[BoundaryTensor, ...]
    messages: int
    copies: int = 1

    @property
    def row_bytes(self) -> int | None:
        """Bytes per row of the batch, both directions, at most; None if a dim is unknown."""
        sizes = [one.row_bytes for one in self.tensors]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        ways = [1 + one.floating for one in self.tensors]
        return self.copies * sum(size * way for size, way in zip(known, ways, strict=True))

    def nbytes(self, rows: int) -> int | None:
        """Bytes per step of so many rows, over all replicas; see `row_bytes`."""
        each = self.row_bytes
        return None if each is None else rows * each

    def __str__(self) -> str:
        each = self.row_bytes
        if each is None:
            shapes = [str(one.shape) for one in self.tensors if one.row_bytes is None]
            return f"by dims of unknown size: {', '.join(shapes)}"
        at_most = "at most " if self.copies > 1 else ""
        return f"{at_most}{each:,} a row of the batch"


def boundary_traffic(
    boundaries: Sequence[Sequence[BoundaryTensor]],
    stages: int,
    replicas: int,
    micro_batches: int,
    devices: int,
) -> list[BoundaryTraffic]:
    """What each virtual stage but the last sends on.

    Args:
        boundaries: The tensors that cross from each virtual stage to the next.
        stages: Stages of the mesh; virtual stage v is on stage v % stages.
        replicas: Replicas of each.
        micro_batches: Of a replica's rows.
        devices: Of a slice.
    """
    times = replicas * micro_batches * devices
    return [
        BoundaryTraffic(
            virtual % stages,
            (virtual + 1) % stages,
            tuple(tensors),
            times * sum(1 + one.floating for one in tensors),
            devices,
        )
        for virtual, tensors in enumerate(boundaries)
    ]
