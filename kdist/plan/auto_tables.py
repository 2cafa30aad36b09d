"""Chooses where tables with `placement="auto"` go: small ones stay, large ones are dealt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence

from kdist._compat import keras_models
from kdist.config.tables import host_setting
from kdist.layers import DistributedEmbedding
from kdist.layers.tables import FeatureConfig, TableConfig, flat
from kdist.plan.deal import COLUMNS, HOST, ROWS, Dealt, TableLoad, deal
from kdist.sharding.mesh import Topology

import keras
import tensorflow as tf

AUTO_BYTES = 2**28
"""What a table may have, without the optimizer's state, to be whole on every device."""


def placed(table: TableConfig, choice: Dealt, devices: int, axis: str) -> TableConfig:
    """A table where it was dealt to.

    Args:
        table: The table.
        choice: Where it goes.
        devices: Size of the axis.
        axis: The axis.
    """
    if choice.kind == HOST:
        return dataclasses.replace(table, placement="host")
    if choice.kind == COLUMNS:
        columns = (table.embedding_dim // devices,) * devices
        return dataclasses.replace(table, placement="split", columns=columns, axis=axis)
    size = table.vocabulary_size
    if choice.kind == ROWS:
        rows = [len(range(device, size, devices)) for device in range(devices)]
    else:
        rows = [size if device == choice.device else 0 for device in range(devices)]
    return dataclasses.replace(table, placement="split", rows=tuple(rows), axis=axis)


def chosen(
    model: keras.Model, topology: Topology, kept: Container[int]
) -> dict[keras.layers.Embedding, TableConfig]:
    """The large ones among a model's tables that nobody has placed, and where they go.

    They are dealt over the batch axis, or without one over the first inner axis; on a single device
    they go to the host, if that is apart.

    Args:
        model: A built model.
        topology: The mesh.
        kept: Identities of tables that stay where layouts put them.
    """
    large = list(_large(model, kept))
    axes = [(topology.data_axis, topology.data_size), *topology.inner_axes]
    axis, devices = next(((name, size) for name, size in axes if size > 1), (None, 1))
    if axis is None:
        apart = large if topology.host_is_apart else []
        return {layer: dataclasses.replace(one, placement="host") for layer, one, _ in apart}
    # Two layers may have a table of one name.
    loads = [dataclasses.replace(load, name=str(n)) for n, (*_, load) in enumerate(large)]
    found = deal(loads, devices).choices if loads else ()
    return {
        layer: placed(one, choice, devices, axis)
        for (layer, one, _), choice in zip(large, found, strict=True)
    }


def _large(
    model: keras.Model, kept: Container[int]
) -> Iterator[tuple[keras.layers.Embedding, TableConfig, TableLoad]]:
    declared = {id(layer) for layer, _ in host_setting.given()}
    for layer in keras_models.flat_layers(model):
        for table in layer.table_configs if isinstance(layer, DistributedEmbedding) else ():
            embedding = layer.tables[table.name]
            free = table.placement == "auto" and id(embedding) not in declared
            special = not embedding.built or embedding.lora_enabled or embedding.quantization_mode
            if not free or special or id(embedding.embeddings) in kept:
                continue
            features = flat(layer.feature_configs, layer.feature_configs, layer.name)
            load = _load(
                table, embedding, [one for one in features if one.table.name == table.name]
            )
            if load.nbytes > AUTO_BYTES:
                yield embedding, table, load


def _load(
    table: TableConfig, embedding: keras.layers.Embedding, features: Sequence[FeatureConfig]
) -> TableLoad:
    """Look-ups are those of one example: only their proportions count."""
    return TableLoad(
        name=table.name,
        rows=table.vocabulary_size,
        dim=table.embedding_dim,
        lookups=sum(math.prod(n or 1 for n in one.input_shape[1:]) for one in features),
        value_bytes=tf.as_dtype(embedding.embeddings.dtype).size,
    )
