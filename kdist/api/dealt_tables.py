"""What a plan says of where the tables of a `DistributedEmbedding` are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kdist._compat import keras_models
from kdist.display.tables import readable
from kdist.layers import DistributedEmbedding
from kdist.layers.tables import TableConfig

import keras
import numpy as np

SHOWN_TABLES = 8
"""Tables of a layer that a note names."""


def dealt_notes(model: keras.Model) -> list[str]:
    """One for each layer: where its tables are, and the bytes of parts per device of an axis."""
    layers = keras_models.flat_layers(model)
    return [_note(one) for one in layers if isinstance(one, DistributedEmbedding)]


def _note(layer: DistributedEmbedding) -> str:
    tables = layer.table_configs
    shown = [f"{one.name!r} {_where(one)}" for one in tables[:SHOWN_TABLES]]
    more = len(tables) - SHOWN_TABLES
    text = f"tables of {layer.name!r}: {', '.join(shown)}" + f" and {more} more" * (more > 0)
    itemsize = np.dtype(keras.backend.standardize_dtype(layer.variable_dtype)).itemsize
    for axis, loads in _loads(tables, itemsize).items():
        text += f"; parts per device of {axis!r}: {', '.join(map(readable, loads))}"
    return text


def _where(table: TableConfig) -> str:
    if table.placement == "host":
        return "on the host"
    if table.placement == "split":
        kind, sizes = ("rows", table.rows) if table.rows else ("columns", table.columns)
        return f"by {kind} {sizes} over {table.axis!r}"
    auto = " (placement='auto', which kdist.deal_tables did not deal)"
    return "whole on every device" + auto * (table.placement == "auto")


def _loads(tables: Sequence[TableConfig], itemsize: int) -> dict[str, list[int]]:
    """Bytes of parts that each device of an axis holds."""
    found: dict[str, list[int]] = defaultdict(list)
    for table in tables:
        sizes, other = (table.rows, table.embedding_dim)
        if table.columns:
            sizes, other = table.columns, table.vocabulary_size
        mine = [n * other * itemsize for n in sizes or ()]
        if table.placement == "split":
            before = found[table.axis] or [0] * len(mine)
            found[table.axis] = [a + b for a, b in zip(before, mine, strict=True)]
    return dict(found)
