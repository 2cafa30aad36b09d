"""Which rows of a table slices look up in a step, and how that follows from a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.sharding.placement import Coordinate
from kdist.storage.alike_rows import Asked

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Asking:
    """How indices of look-ups follow from a batch, by turn; see `FetchedTable`.

    Attributes:
        on: Computes them on a device.
        sizes: How many they would be if tensors of the batch had the shapes that a function gives
            of them; None where that does not follow.
    """

    on: Callable[[str], Sequence[Any]]
    sizes: Callable[[Callable[[Any], Any]], Sequence[int | None]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The rows of a table that one slice looks up in a step.

    Attributes:
        indices: Of each look-up, in the order in which the program makes them.
        unique: The same, each once; in ascending order if parts are asked for their own rows.
        positions: Of each look-up, where in `unique` it is.
        asked: Of each part of the table, the rows of the table that it is asked for.
        sizes: Look-ups of each turn; see `FetchedTable`.
        asking: How the indices follow from the batch.
    """

    indices: Any
    unique: Any
    positions: Any
    asked: Sequence[Any]
    sizes: Sequence[Any]
    asking: Asking


@dataclasses.dataclass(eq=False)
class LookUps:
    """What slices look up in a table in one step, or in one call of a layer.

    Attributes:
        wanted: Per slice, the rows.
        asked: Per stage and number of a virtual stage there, its look-ups, by their total size.
        sent: Rows of a part, by slice and the holder that gives them.
        sums: What several devices take alike, by slice and the device that made it.
        there: Rows that were fetched a step ahead, by the coordinate that has them.
        of_call: Whether of a call: its gradient is for a tape, which takes each look-up's row.
    """

    wanted: dict[int, Wanted] = dataclasses.field(default_factory=dict)
    asked: dict[tuple[int, int], dict[int | None, Sequence[Asked]]] = dataclasses.field(
        default_factory=dict
    )
    sent: dict[tuple[int, Coordinate], Any] = dataclasses.field(default_factory=dict)
    sums: dict[tuple[int, Coordinate], Any] = dataclasses.field(default_factory=dict)
    there: dict[Coordinate, Any] = dataclasses.field(default_factory=dict)
    of_call: bool = False

    def want(self, s: int, wanted: Wanted) -> None:
        """Notes what a slice looks up now."""
        self.wanted[s] = wanted
        every: tuple[dict[Any, Any], ...] = (self.sent, self.sums, self.there)
        for known in every:
            for key in [key for key in known if key[0] == s]:
                del known[key]


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What one slice looks up in the next step in a table on the host.

    Attributes:
        wanted: Which rows.
        rows: These rows, per device of the slice.
    """

    wanted: Wanted
    rows: Sequence[Any]

    @property
    def tensors(self) -> list[Any]:
        """What a step hands to the next."""
        sizes = [n for n in self.wanted.sizes if tf.is_tensor(n)]
        return [self.wanted.indices, self.wanted.unique, self.wanted.positions, *self.rows, *sizes]

    def of(self, tensors: Sequence[Any]) -> Ahead:
        """The same of another step, whose tensors these are."""
        indices, unique, positions, *rest = tensors
        rows, unknown = rest[: len(self.rows)], iter(rest[len(self.rows) :])
        sizes = [next(unknown) if tf.is_tensor(n) else n for n in self.wanted.sizes]
        changed = {"indices": indices, "unique": unique, "positions": positions, "sizes": sizes}
        return Ahead(dataclasses.replace(self.wanted, **changed, asked=[unique]), rows)
