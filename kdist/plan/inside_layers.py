"""What layers communicate over the inner axes: counts, and bytes by rows of the batch. Pure.

The compiler decides which collectives a program has, for each size of a batch: they are read from
programs that were lowered. From those for two sizes follow the bytes for any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kdist.display.tables import readable


class Communicates(Protocol):
    """A collective of a program; see `kdist.dtensor.lowered.Collective`."""

    @property
    def kind(self) -> str:
        """See `InsideTraffic`."""

    @property
    def axis(self) -> tuple[str, ...]:
        """See `InsideTraffic`."""

    @property
    def phase(self) -> str:
        """See `InsideTraffic`."""

    @property
    def bytes(self) -> int:
        """Of its result on one device."""


@dataclasses.dataclass(frozen=True)
class InsideTraffic:
    """Collectives of one kind that layers cause over inner axes, per step.

    Attributes:
        kind: "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "broadcast" or "other".
        axis: Names of the mesh axes over which devices take part.
        phase: "forward" or "backward".
        collectives: How many a step runs, by all groups of devices, replicas and micro-batches.
        sizes: Rows of the batch, and bytes of the results on one device of each group, of all
            groups together, of the sizes for which programs were lowered. Of a reduce-scatter it
            is what is reduced that counts.
    """

    kind: str
    axis: tuple[str, ...]
    phase: str
    collectives: int
    sizes: tuple[tuple[int, int], ...]

    @property
    def by_rows(self) -> tuple[int, int] | None:
        """Bytes whatever the batch, and bytes of a row; None while one size alone is known."""
        if len(self.sizes) < 2:
            return None
        (rows, nbytes), (other, more) = self.sizes[0], self.sizes[-1]
        each, rest = divmod(more - nbytes, other - rows)
        return None if rest else (nbytes - each * rows, each)

    def nbytes(self, rows: int) -> int | None:
        """Bytes for a batch of so many rows; None if that does not follow from what is known."""
        known = dict(self.sizes)
        if rows in known or self.by_rows is None:
            return known.get(rows)
        fixed, each = self.by_rows
        return fixed + each * rows

    def __str__(self) -> str:
        if self.by_rows is None:
            return ", ".join(f"{readable(n)} for {rows} rows" for rows, n in self.sizes)
        fixed, each = self.by_rows
        parts = [readable(fixed)] * bool(fixed or not each) + [f"{each:,} a row"] * bool(each)
        return " + ".join(parts)


def counted_per(micro_batches: int) -> str:
    """Of what the collectives of recorded programs are, for a reader."""
    if micro_batches == 1:
        return "per slice and step"
    return f"per replica and micro-batch, of which a step has {micro_batches}"


def inside_traffic(
    programs: Mapping[int, Sequence[Communicates]],
    passes: int,
    devices: int,
    axis_size: Callable[[str], int],
) -> list[InsideTraffic]:
    """Adds up the collectives of lowered programs, by kind, axes and phase.

    Args:
        programs: By rows of a program, its collectives.
        passes: How often a step runs one: replicas, times micro-batches.
        devices: That run it together.
        axis_size: Tells how many devices a mesh axis has.
    """
    found: dict[tuple[str, tuple[str, ...], str], dict[int, list[int]]] = {}
    for rows, collectives in sorted(programs.items()):
        for one in collectives:
            key = (one.kind, one.axis, one.phase)
            found.setdefault(key, {}).setdefault(rows, []).append(one.bytes)
    traffic = []
    for (kind, axis, phase), by_rows in found.items():
        times = passes * (devices // math.prod(map(axis_size, axis)))
        count = len(by_rows[max(by_rows)])
        alike = {rows: sizes for rows, sizes in by_rows.items() if len(sizes) == count}
        sizes = tuple((rows * passes, times * sum(each)) for rows, each in alike.items())
        traffic.append(InsideTraffic(kind, axis, phase, times * count, sizes))
    return traffic
