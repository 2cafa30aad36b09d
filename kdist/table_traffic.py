"""What the gradients of embedding tables send: rows that were looked up, never the table. Pure.

How many rows that are is known when a batch is there, so bytes are given per looked-up row: a
replica whose part of the batch looks up R rows of a table has a gradient of R rows. Messages count
pairs of values and indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdist.placement import Placement, UpdateUnit
from kdist.sparse import LookUp


@dataclasses.dataclass(frozen=True)
class TableTraffic:
    """How the gradient of one table travels, per step.

    Attributes:
        path: Keras path of the table.
        messages: Rows sent from one device to another, values and indices as one.
        row_bytes: Bytes sent, divided by the rows that one replica looks up.
        at_most: Whether they are an upper bound: which rows go where depends on the indices.
    """

    path: str
    messages: int
    row_bytes: int
    at_most: bool = False

    def nbytes(self, rows: int) -> int:
        """Bytes of a step in which every replica looks up some rows (at most; see `at_most`)."""
        return rows * self.row_bytes

    def __str__(self) -> str:
        limit = "at most " if self.at_most else ""
        return f"{limit}{self.row_bytes} B x looked-up rows of a replica"


def table_traffic(
    placement: Placement, units: Sequence[UpdateUnit], look_up: LookUp, micro_batches: int = 1
) -> TableTraffic:
    """Counts what a table's gradient sends to the owners of its parts.

    Args:
        placement: Where the table is stored.
        units: Who updates which part of it.
        look_up: How its rows are looked up.
        micro_batches: Of a replica; the rows of each travel by themselves, but for those that are
            picked out for a part of the table.
    """
    replicas = len(placement.slices)
    blocks = _columns(placement)
    by_columns: dict[tuple[int, int], list[UpdateUnit]] = {}
    for unit in units:
        columns = unit.index(placement)[1]
        by_columns.setdefault((columns.start, columns.stop), []).append(unit)
    messages = row_bytes = 0
    at_most = not look_up.by_batch
    for (start, stop), sharing in by_columns.items():
        row = (stop - start) * placement.itemsize + look_up.index_bytes
        if sharing[0].shard is None and blocks > 1:
            # An update of the whole table gets each block of columns from every replica.
            sent, rows = (replicas * blocks - 1) * micro_batches, replicas * blocks
            at_most = True
        elif len(sharing) == 1:
            sent, rows = (replicas - 1) * micro_batches, replicas - 1
        elif sharing[0].rows is not None and len(placement.table[0]) == 1:
            # All rows meet on one replica, which deals them out to the owners of the others.
            sent, rows = (replicas - 1) * micro_batches + len(sharing) - 1, 2 * replicas - 1
            at_most = True
        else:
            # Each row goes to the one owner of the part that it falls on.
            sent, rows = len(sharing) * (replicas - 1), replicas
            at_most = True
        messages, row_bytes = messages + sent, row_bytes + rows * row * bool(sent)
    return TableTraffic(placement.path, messages, row_bytes, at_most)


def _columns(placement: Placement) -> int:
    """Blocks of columns that inner axes cut the table into."""
    inner = range(len(placement.table[0]))
    return len({placement.inner_index(k)[1].start for k in inner})
