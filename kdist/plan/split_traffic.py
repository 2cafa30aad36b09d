"""What look-ups in tables that are split by hand send, by each way of looking up. Pure.

Bytes are those of a step, over all replicas, for each different row that one replica looks up, or
for each of its look-ups. Gradients of these rows: see `kdist.plan.table_traffic`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.sharding.placement import Placement, Way
from kdist.storage.sparse import LookUp

POSITION_BYTES = 4
"""Of the number that says which of the different rows a look-up takes."""


@dataclasses.dataclass(frozen=True)
class WayTraffic:
    """What one way of looking up sends.

    Attributes:
        way: Which; see `kdist.sharding.placement.TableSplit.way`.
        messages: Tensors sent from one device to another.
        row_bytes: Bytes, divided by the different rows that a replica looks up.
        look_up_bytes: Further bytes, divided by its look-ups.
        at_most: Whether less is sent where rows lie on the device that looks them up.
    """

    way: Way
    messages: int
    row_bytes: int
    look_up_bytes: int
    at_most: bool = False

    def nbytes(self, rows: int, look_ups: int) -> int:
        """Bytes of a step in which each replica looks up some rows; at most, if `at_most`."""
        return rows * self.row_bytes + look_ups * self.look_up_bytes

    def __str__(self) -> str:
        parts = [f"{self.row_bytes} B x rows of a replica"] if self.row_bytes else []
        if self.look_up_bytes:
            parts.append(f"{self.look_up_bytes} B x its look-ups")
        return "at most " * self.at_most + (", ".join(parts) or "nothing")


@dataclasses.dataclass(frozen=True)
class SplitTraffic:
    """How rows of a table that is split by hand reach the devices that look them up, per step.

    Attributes:
        path: Keras path of the table.
        axis: Axis that its rows are split over.
        sizes: Of each part: its rows, or its columns.
        used: What is sent.
        others: What other ways would send.
    """

    path: str
    axis: str
    sizes: tuple[int, ...]
    used: WayTraffic
    others: tuple[WayTraffic, ...]

    @property
    def messages(self) -> int:
        """Tensors sent from one device to another."""
        return self.used.messages

    def __str__(self) -> str:
        return f"by {self.used.way}: {self.used}"

    def compared(self) -> str:
        """What the other ways would send, in one line."""
        return "; ".join(f"{one.way}: {one}" for one in self.others)


def split_traffic(placement: Placement, look_up: LookUp) -> SplitTraffic:
    """Counts what look-ups in a table send that is split by hand, and what they would send.

    Args:
        placement: Where the table is.
        look_up: How its rows are looked up.
    """
    split = placement.split
    assert split is not None
    kind = _OverData if split.cuts_batch else _OverInner
    ways: Any = kind(placement, look_up)
    general = [] if split.dim else [ways.exchanged(), ways.masked()]
    known = [*general, ways.local_columns(), ways.by_columns()]
    used = next(one for one in known if one.way == split.way)
    return SplitTraffic(
        path=placement.path,
        axis=split.axis,
        sizes=tuple(shard.shape[split.dim] for shard in placement.shards),
        used=used,
        others=tuple(one for one in general if one is not used),
    )


class _Ways:
    """Sizes that both kinds of axes count with."""

    def __init__(self, placement: Placement, look_up: LookUp) -> None:
        self.slices = placement.slices
        self.table = placement.table
        self.parts = len(placement.shards)
        # Of each part, bytes of what it has of one row, if it is one of columns.
        self.blocks = [shard.shape[1] * placement.itemsize for shard in placement.shards]
        self.filled = {p for p, shard in enumerate(placement.shards) if 0 not in shard.shape}
        self.devices = len(placement.table[0])
        self.row = placement.nbytes // placement.shape[0]
        self.id = look_up.index_bytes
        # Which of the different rows each look-up takes: from a slice's first device to the others.
        self.to_others = len(self.slices) * (self.devices - 1)

    def has(self, s: int, k: int) -> bool:
        """Whether a coordinate has any of the table."""
        return self.table[s][k] in self.filled

    def _way(self, way: Way, messages: int, row_bytes: int, at_most: bool = False) -> WayTraffic:
        positions = self.to_others * POSITION_BYTES
        return WayTraffic(way, messages + self.to_others, row_bytes, positions, at_most)


class _OverData(_Ways):
    """The axis cuts the batch: each device asks its peers in all slices."""

    def __init__(self, placement: Placement, look_up: LookUp) -> None:
        super().__init__(placement, look_up)
        owns = sum(self.has(s, 0) for s in self.slices)
        self.asked = len(self.slices) * len(self.filled) * self.devices - owns
        self.answers = self.devices * (len(self.slices) * len(self.filled) - owns)

    def exchanged(self) -> WayTraffic:
        """Each part gets the numbers of its rows, and sends them."""
        nbytes = len(self.slices) * self.devices * (self.row + self.id)
        return self._way("all-to-all", self.asked + self.answers, nbytes, at_most=True)

    def masked(self) -> WayTraffic:
        """Each part gets all numbers, and sends a row for each."""
        nbytes = self.asked * self.id + self.answers * self.row
        return self._way("reduce-scatter", self.asked + self.answers, nbytes)

    def local_columns(self) -> WayTraffic:
        """Each part sends its column."""
        sent = self.devices * (self.parts - 1) * len(self.slices)
        return WayTraffic("local columns", sent, 0, sent * self.row // self.parts)

    def by_columns(self) -> WayTraffic:
        """Each part gets all numbers, and sends its columns of each row."""
        sent = self.devices * sum(
            sum(self.blocks) - self.blocks[self.table[s][0]] for s in self.slices
        )
        return self._way("by columns", self.asked + self.answers, self.asked * self.id + sent)


class _OverInner(_Ways):
    """The axis does not cut the batch: all devices of a slice take the same rows."""

    def __init__(self, placement: Placement, look_up: LookUp) -> None:
        super().__init__(placement, look_up)
        self.groups = len(self.slices) * self.devices // self.parts
        self.asked = sum(self.has(s, k) for s in self.slices for k in range(1, self.devices))

    def exchanged(self) -> WayTraffic:
        """Each part gets the numbers of its rows, and sends them to all others."""
        messages = self.groups * len(self.filled) * (self.parts - 1)
        nbytes = self.groups * ((self.parts - 1) * self.row + self.id)
        return self._way("all-gather", self.asked + messages, nbytes, at_most=True)

    def masked(self) -> WayTraffic:
        """Each part gets all numbers; rows are summed on one device, and go from there to all."""
        messages = self.groups * (len(self.filled) - 1 + self.parts - 1)
        nbytes = self.asked * self.id + messages * self.row
        return self._way("all-reduce", self.asked + messages, nbytes)

    def local_columns(self) -> WayTraffic:
        """Each part sends its column to all others."""
        blocks = self.groups * (self.parts - 1)
        return WayTraffic("local columns", blocks * self.parts, 0, blocks * self.row)

    def by_columns(self) -> WayTraffic:
        """Each part gets all numbers, and sends its columns of each row to all others."""
        messages = self.groups * len(self.filled) * (self.parts - 1)
        sent = self.groups * (self.parts - 1) * self.row
        return self._way("by columns", self.asked + messages, self.asked * self.id + sent)
