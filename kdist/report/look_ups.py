"""What look-ups in a split table sent, read from an executed step."""

from __future__ import annotations

import dataclasses

from kdist.graphs.executed import ExecutedFunction, ExecutedTransfer
from kdist.storage.fetched_table import ASKED, FETCHED

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class SentByLookUps:
    """Tensors that went from one device to another for look-ups.

    Attributes:
        numbers: Numbers of rows that parts were asked for.
        rows: Rows, or columns of them.
        positions: For each look-up, which of the different rows it takes.
    """

    numbers: tuple[ExecutedTransfer, ...]
    rows: tuple[ExecutedTransfer, ...]
    positions: tuple[ExecutedTransfer, ...]

    @property
    def messages(self) -> int:
        """How many."""
        return len(self.numbers) + len(self.rows) + len(self.positions)

    def nbytes(self, asked: int, width: int, look_ups: int) -> int:
        """Their bytes; how many rows are in a tensor depends on the batch, and is not in the graph.

        Args:
            asked: Rows that each part is asked for.
            width: Values of what a part sends of a row.
            look_ups: Look-ups of a replica.
        """
        sizes = ((self.numbers, asked), (self.rows, asked * width), (self.positions, look_ups))
        return sum(size * tf.as_dtype(one.dtype).size for sent, size in sizes for one in sent)


def sent_by_look_ups(step: ExecutedFunction) -> SentByLookUps:
    """Picks out of an executed step what its look-ups sent.

    Args:
        step: A step of a model with one table that is split by hand.
    """
    rows = [one for one in step.transfers if FETCHED in one.tensor]
    asked = [one for one in step.transfers if ASKED in one.tensor]
    second = [one.tensor.endswith(":1") or one.op == "LowerBound" for one in asked]
    return SentByLookUps(
        numbers=tuple(one for one, other in zip(asked, second, strict=True) if not other),
        rows=tuple(rows),
        positions=tuple(one for one, other in zip(asked, second, strict=True) if other),
    )
