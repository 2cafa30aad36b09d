"""What a plan says of where the tables of a `DistributedEmbedding` are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kdist._compat import keras_models
from kdist.display.tables import readable
from kdist.layers import DistributedEmbedding
from kdist.layers.tables import TableConfig
from kdist.plan import auto_tables

import keras
import numpy as np

SHOWN_TABLES = 8
"""Tables of a layer that a note names."""


def dealt_notes(
    model: keras.Model, chosen: Mapping[keras.layers.Embedding, TableConfig]
) -> list[str]:
    """One for each layer: where its tables are, and the bytes of parts per device of an axis.

    Args:
        model: The model.
        chosen: Tables with `placement="auto"` that go elsewhere than whole on every device.
    """
    layers = keras_models.flat_layers(model)
    return [_note(one, chosen) for one in layers if isinstance(one, DistributedEmbedding)]


def _note(layer: DistributedEmbedding, chosen: Mapping[keras.layers.Embedding, TableConfig]) -> str:
    tables = [chosen.get(layer.tables[one.name], one) for one in layer.table_configs]
    shown = [f"{one.name!r} {_where(one)}" for one in tables[:SHOWN_TABLES]]
    more = len(tables) - SHOWN_TABLES
    text = f"tables of {layer.name!r}: {', '.join(shown)}" + f" and {more} more" * (more > 0)
    itemsize = np.dtype(keras.backend.standardize_dtype(layer.variable_dtype)).itemsize
    if any(one in tables for one in chosen.values()):
        text += f" (of placement='auto', those above {readable(auto_tables.AUTO_BYTES)} were dealt)"
    for axis, loads in _loads(tables, itemsize).items():
        text += f"; parts per device of {axis!r}: {', '.join(map(readable, loads))}"
    return text


def _where(table: TableConfig) -> str:
    if table.placement == "host":
        return "on the host"
    if table.placement == "split":
        kind, sizes = ("rows", table.rows) if table.rows else ("columns", table.columns)
        return f"by {kind} {sizes} over {table.axis!r}"
    return "whole on every device"


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
