"""Constant ids that a model looks up in tables: once for all rows of a batch, or for each row.

One device has one gradient for the former (positions), and as many as rows for the latter
(`ops.full((rows, 1), first)`). In a trace on one row they look the same. What a trace on many rows
shows (`kdist.rows`) tells them apart.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import numpy as np

Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""What one row has: shape, and values."""


@dataclasses.dataclass(frozen=True)
class ConstantIds:
    """What a model looks up that no value of the batch decides.

    Attributes:
        once: For all rows, as a tensor with dim 0 of size 1.
        each: For each row.
    """

    once: frozenset[Ids] = frozenset()
    each: frozenset[Ids] = frozenset()

    def with_look_up(self, ids: np.ndarray, rows: int) -> ConstantIds:
        """These and another look-up.

        Args:
            ids: Its ids.
            rows: Of the batch, more than one.
        """
        if not ids.ndim or not len(ids) or np.any(ids != ids[:1]):
            return self
        one = frozenset({_of_one_row(ids)})
        each, once = one if len(ids) == rows else (), one if len(ids) == 1 else ()
        return ConstantIds(self.once.union(once), self.each.union(each))

    def for_each_row(self, ids: np.ndarray) -> bool | None:
        """Whether ids are for each row, of which there is one; None if that cannot be told."""
        one = _of_one_row(ids)
        each, once = one in self.each, one in self.once
        return each if each != once else None


def _of_one_row(ids: np.ndarray) -> Ids:
    return ids.shape[1:], tuple(int(n) for n in ids[0].reshape(-1))


_known: contextvars.ContextVar[ConstantIds | None]
_known = contextvars.ContextVar("constant_ids", default=None)


@contextlib.contextmanager
def knowing(ids: ConstantIds) -> Iterator[None]:
    """Meanwhile, what is traced is a model that looks up these."""
    before = _known.set(ids)
    try:
        yield
    finally:
        _known.reset(before)


def for_each_row(ids: np.ndarray) -> bool | None:
    """See `ConstantIds.for_each_row`, of the model that is being traced."""
    known = _known.get()
    return None if known is None else known.for_each_row(ids)
