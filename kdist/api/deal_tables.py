"""Decides where the tables of a `DistributedEmbedding` go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdist.layers.tables import TableConfig
from kdist.plan.auto_tables import placed
from kdist.plan.deal import Deal, TableLoad, deal

import keras
import numpy as np


def deal_tables(
    tables: Sequence[TableConfig],
    devices: int,
    *,
    lookups: Mapping[str, int],
    axis: str = "data",
    device_bytes: int | None = None,
    host: bool = False,
) -> tuple[list[TableConfig], Deal]:
    """Deals tables to the devices of a mesh axis, so that each holds and looks up about as much.

    Tables with `placement="auto"` are dealt: whole to one device, by rows or by
    columns to all, or to the host.
    Others stay as they are, and do not count.

    Args:
        tables: The tables.
        devices: Size of the axis.
        lookups: How many ids a step looks up in each table, by its name.
        axis: Mesh axis that the tables are dealt over, any but `pipe`.
        device_bytes: Bytes of tables that a device may hold; None for any number. Optimizer state
            takes as much again for each slot, and does not count here.
        host: Whether tables may go to the host.

    Returns:
        The tables, in order, with placements; and the deal, which prints as a table of loads.

    Raises:
        ValueError: A table has no number of look-ups, or there is no deal within `device_bytes`.

    Example:
        >>> table = kdist.layers.TableConfig
        >>> tables = [table("users", 9000, 16), table("items", 9000, 16)]
        >>> tables, found = kdist.deal_tables(tables, 2, lookups={"users": 64, "items": 64})
        >>> sorted(one.rows for one in tables)
        [(0, 9000), (9000, 0)]
    """
    dealt = [one for one in tables if one.placement == "auto"]
    missing = [one.name for one in dealt if one.name not in lookups]
    if missing:
        raise ValueError(
            f"lookups says how many ids a step looks up in each table. Received: none for {missing}"
        )
    value_bytes = np.dtype(keras.config.floatx()).itemsize
    loads = [
        TableLoad(
            name=one.name,
            rows=one.vocabulary_size,
            dim=one.embedding_dim,
            lookups=lookups[one.name],
            value_bytes=value_bytes,
        )
        for one in dealt
    ]
    found = deal(loads, devices, capacity=device_bytes, host=host)
    choices = {
        one.name: placed(one, choice, devices, axis)
        for one, choice in zip(dealt, found.choices, strict=True)
    }
    return [choices.get(one.name, one) for one in tables], found
