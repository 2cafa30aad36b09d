"""Look-ups in tables of which rows are fetched: noted, or answered with rows that were fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer

import keras
import tensorflow as tf


class TableRows:
    """What a program's look-ups return: the rows that it was given.

    Args:
        rows: By identity of the table, the rows of all of its look-ups, in their order.
    """

    def __init__(self, rows: Mapping[int, Any]) -> None:
        self._rows = dict(rows)
        self._taken = dict.fromkeys(rows, 0)

    def look_up(self, layer: keras.layers.Embedding, ids: Any) -> Any:
        """The rows of some indices: the next ones."""
        table = layer.embeddings
        rows, start = self._rows[id(table)], self._taken[id(table)]
        known = None not in ids.shape
        size = math.prod(ids.shape) if known else tf.size(ids)
        if not (known and isinstance(start, int) and (start, rows.shape[0]) == (0, size)):
            rows = rows[start : start + size]
        self._taken[id(table)] = start + size
        shape = [*ids.shape] if known else tf.shape(ids)
        rows = keras_trainer.autocast(table, rows)
        return tf.reshape(rows, tf.concat([shape, rows.shape[1:]], 0))


class Recorded:
    """Notes what is looked up, and returns placeholders for the rows.

    Attributes:
        ids: By identity of the table, the virtual stage and the indices of each look-up.
        rows: The placeholders, with the layer.
        virtual: The virtual stage that is called now; None where stages do not matter.
    """

    def __init__(self) -> None:
        self.ids: dict[int, list[tuple[int | None, Any]]] = {}
        self.virtual: int | None = None
        self.rows: list[tuple[Any, str]] = []

    def look_up(self, layer: keras.layers.Embedding, ids: Any) -> Any:
        """See `TableRows`."""
        table = layer.embeddings
        self.ids.setdefault(id(table), []).append((self.virtual, ids))
        rows = tf.compat.v1.placeholder(table.dtype, [*ids.shape, table.shape[1]])
        self.rows.append((rows, f"rows of {table.path!r}"))
        return keras_trainer.autocast(table, rows)

    def asked(self, table: keras.Variable, virtual: int | None) -> list[Any]:
        """Indices of the look-ups in a table; of one virtual stage, or of all."""
        every = self.ids.get(id(table), [])
        return [t for at, t in every if virtual in (None, at)]

    def indices(self, table: keras.Variable, virtuals: Sequence[int]) -> list[Any]:
        """Those of all look-ups in a table, flat; of each of its virtual stages, if it has some."""
        every = self.ids.get(id(table), [])
        dtype = tf.int64 if any(t.dtype == tf.int64 for _, t in every) else tf.int32
        found = []
        for mine in virtuals or (None,):
            flat = [tf.reshape(tf.cast(t, dtype), [-1]) for t in self.asked(table, mine)]
            found.append(tf.concat(flat, 0) if flat else tf.zeros([0], dtype))
        return found
