"""What is sent of embedding tables: rows of gradients, and rows that an update changed. Pure.

How many rows that are is known when a batch is there, so bytes are given per row: a replica whose
part of the batch looks up R rows of a table has a gradient of R rows; of new values each row is
sent once, however often it was looked up, so that never more than the table travels. Messages
count pairs of values and indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdist.sharding.mesh import HOST
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Placement, shape_of
from kdist.storage.sparse import LookUp

PLACE_BYTES = 8
"""Of the number that says which of a replica's rows one is."""


@dataclasses.dataclass(frozen=True)
class TableTraffic:
    """How the rows of one table travel, per step.

    Attributes:
        path: Keras path of the table.
        messages: Rows sent from one device to another, values and indices as one.
        row_bytes: Bytes of gradients, divided by the rows that one replica looks up.
        at_most: Whether they are an upper bound: which rows go where depends on the indices.
        changed_messages: How many of the messages are rows that the update changed.
        changed_bytes: Bytes of these, divided by the rows that change (an upper bound, if several
            owners update them); 0 if the table is sent whole, or to nobody.
        replicas: How many replicas look up rows of their own.
        size: Rows of the table.
    """

    path: str
    messages: int
    row_bytes: int
    at_most: bool = False
    changed_messages: int = 0
    changed_bytes: int = 0
    replicas: int = 1
    size: int = 0

    def changed(self, rows: int) -> int:
        """Rows that change, at most, if every replica looks up some rows."""
        return min(rows * self.replicas, self.size)

    def nbytes(self, rows: int) -> int:
        """Bytes of a step in which every replica looks up some rows.

        At most so many if `at_most`, and where the replicas look up a row more than once.
        """
        return rows * self.row_bytes + self.changed(rows) * self.changed_bytes

    def __str__(self) -> str:
        limit = "at most " if self.at_most else ""
        text = f"{limit}{self.row_bytes} B x looked-up rows of a replica"
        return text + f", {self.changed_bytes} B x rows that change" * bool(self.changed_bytes)


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """How rows of a table on the host travel, per step.

    Attributes:
        path: Keras path of the table.
        nbytes: Of the table.
        messages: Tensors sent from one device to another.
        down: Bytes sent to the devices of a replica, divided by the rows that it looks up, each
            counted once.
        up: Bytes sent to the host, divided by the same: indices.
        back: Bytes of gradients and their indices, divided by the rows of the gradient: those, if
            `combined`, else one for each look-up.
        combined: Whether gradients of one row are summed before they travel.
        replicas: How many replicas look up rows of their own.
        again: Bytes sent to the devices of a replica, divided by those of its rows that the step
            before has changed, where rows are looked up a step ahead; else 0.
    """

    path: str
    nbytes: int
    messages: int
    down: int
    up: int
    back: int
    combined: bool
    replicas: int
    again: int = 0

    def sent(self, rows: int, look_ups: int, changed: int = 0) -> tuple[int, int]:
        """Bytes (to the devices, to the host) of a step.

        Args:
            rows: Different rows that one replica looks up.
            look_ups: How many look-ups these are.
            changed: How many of the rows the step before has changed, if rows are looked up ahead.
        """
        gradients = rows if self.combined else look_ups
        to_host = rows * self.up + gradients * self.back
        to_devices = rows * self.down + changed * self.again
        return self.replicas * to_devices, self.replicas * to_host

    def __str__(self) -> str:
        back = "" if self.combined else f", {self.back} B x look-ups"
        up = self.up + self.back * self.combined
        again = f", {self.again} B x those just changed" * bool(self.again)
        return f"{self.down} B x rows of a replica to it{again}; {up} B x rows{back} to the host"


def host_traffic(
    placement: Placement,
    look_up: LookUp,
    combined: bool = True,
    pieces: int = 1,
    ahead: bool = False,
    trains: bool = True,
) -> HostTraffic:
    """Counts what goes between the host and the replicas that look rows of a table up.

    Args:
        placement: Where the table is: on the host.
        look_up: How its rows are looked up.
        combined: Whether gradients of one row are summed before they travel.
        pieces: In how many pieces the gradient of a replica travels, where there are several.
        ahead: Whether rows are looked up a step ahead; then the numbers of a step's rows travel
            twice, and rows that it has changed, with their places, to those that will use them.
        trains: Whether gradients travel at all.
    """
    replicas, devices = len(placement.slices), len(placement.table[0])
    row = placement.nbytes // placement.shape[0]
    gradients = trains * replicas * (pieces if look_up.by_batch and replicas > 1 else 1)
    each = 1 + devices + (not combined) + (1 + 2 * devices) * ahead
    return HostTraffic(
        path=placement.path,
        nbytes=placement.nbytes,
        messages=replicas * each + gradients,
        down=row * devices,
        up=look_up.index_bytes * (1 + ahead),
        back=trains * (row + look_up.index_bytes * (not combined)),
        combined=combined,
        replicas=replicas,
        again=(row + PLACE_BYTES) * devices * ahead,
    )


def table_traffic(
    placement: Placement,
    units: Sequence[UpdateUnit],
    look_up: LookUp,
    pieces: int = 1,
    row_updates: bool = False,
) -> TableTraffic:
    """Counts what a table's gradient sends to the owners of its parts, and what they send back.

    Args:
        placement: Where the table is stored.
        units: Who updates which part of it.
        look_up: How its rows are looked up.
        pieces: In how many pieces the rows of a replica's gradient travel, those of each
            micro-batch, but for rows that are picked out for a part of the table.
        row_updates: Whether owners send rows that changed; else the table, which is counted
            elsewhere.
    """
    replicas = len(placement.slices)
    blocks = _columns(placement)
    by_columns: dict[tuple[int, int], list[UpdateUnit]] = {}
    # Of a table that is split by hand, a part may be empty.
    for unit in (one for one in units if 0 not in shape_of(one.index(placement))):
        columns = unit.index(placement)[1]
        by_columns.setdefault((columns.start, columns.stop), []).append(unit)
    messages = row_bytes = 0
    at_most = not look_up.by_batch
    for (start, stop), sharing in by_columns.items():
        row = (stop - start) * placement.itemsize + look_up.index_bytes
        if sharing[0].owner == HOST:
            sent, rows = replicas * blocks * pieces, replicas * blocks
        elif sharing[0].shard is None and blocks > 1:
            # An update of the whole table gets each block of columns from every replica.
            sent, rows = (replicas * blocks - 1) * pieces, replicas * blocks
            at_most = True
        elif len(sharing) == 1:
            sent, rows = (replicas - 1) * pieces, replicas - 1
        elif sharing[0].span is not None and len(placement.table[0]) == 1:
            # All rows meet on one replica, which deals them out to the owners of the others.
            sent, rows = (replicas - 1) * pieces + len(sharing) - 1, 2 * replicas - 1
            at_most = True
        else:
            # Each row goes to the one owner of the part that it falls on.
            sent, rows = len(sharing) * (replicas - 1), replicas
            at_most = True
        messages, row_bytes = messages + sent, row_bytes + rows * row * bool(sent)
    back, back_bytes = _changed(placement, units, look_up) if row_updates else (0, 0)
    return TableTraffic(
        path=placement.path,
        messages=messages + back,
        row_bytes=row_bytes,
        at_most=at_most,
        changed_messages=back,
        changed_bytes=back_bytes,
        replicas=replicas if look_up.by_batch else 1,
        size=placement.shape[0],
    )


def _changed(placement: Placement, units: Sequence[UpdateUnit], look_up: LookUp) -> tuple[int, int]:
    """Messages with changed rows, and their bytes per row of the table that changes.

    The rows of a shard meet on one of its owners, and go from there to its other holders.
    """
    messages, row_bytes = 0, dict[tuple[int, int], int]()
    for number in sorted({unit.shard for unit in units if unit.shard is not None}):
        shard = placement.shards[number]
        owners = [unit for unit in units if unit.shard == number]
        others = len(shard.holders) - 1
        if not others:
            continue
        messages += len(owners) - 1 + others
        columns = shard.index[1].start, shard.index[1].stop
        values = (columns[1] - columns[0]) * placement.itemsize
        row = values + look_up.index_bytes
        sent = row * others
        if owners[0].dim == 0:
            sent += row * (len(owners) > 1)
        else:  # each has its columns of every row
            sent += values * (len(owners) - 1) // len(owners)
        row_bytes[columns] = max(row_bytes.get(columns, 0), sent)
    return messages, sum(row_bytes.values())


def _columns(placement: Placement) -> int:
    """Blocks of columns that inner axes cut the table into."""
    inner = range(len(placement.table[0]))
    return len({placement.inner_index(k)[1].start for k in inner})
