"""Which parameters share a bucket: fusion settings read against one model and its optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kdist._compat import keras_optimizers
from kdist.config.fusion import FusionConfig, Item, assign_buckets, comm_fusion
from kdist.sharding.placement import Placement

import keras


def bucket_keys(
    config: FusionConfig,
    variables: Sequence[keras.Variable],
    placements: Sequence[Placement],
    groups: Sequence[tuple[Any, list[int]]],
    whole: Sequence[bool],
    apart: frozenset[int],
    compressors: Sequence[Hashable],
) -> tuple[Hashable | None, ...]:
    """Gives every trainable parameter the key of its bucket, None where it travels alone.

    Args:
        config: The settings.
        variables: The trainable variables.
        placements: Where each is stored.
        groups: The optimizers that do math, with the positions of their variables.
        whole: Per variable, whether its update must see the whole tensor.
        apart: Positions of variables that are never fused: their gradients are rows, or maxima.
        compressors: How each gradient travels over the data axis.

    Raises:
        ValueError: A position of `config.index` is past the last parameter.
    """
    rules: list[Hashable] = [None] * len(variables)
    for number, (leaf, members) in enumerate(groups):
        for v in members:
            decays = keras_optimizers.decays(leaf, variables[v])
            rules[v] = (number, decays, str(variables[v].dtype), whole[v], compressors[v])
    ids = comm_fusion.of(variables)
    items = [
        Item(p.nbytes, (rules[v], v if v in apart else _held(p)), ids[v])
        for v, p in enumerate(placements)
    ]
    buckets = assign_buckets(items, config)
    return tuple(
        None if v in apart else (bucket, rules[v], _held(placements[v]))
        for v, bucket in enumerate(buckets)
    )


def _held(placement: Placement) -> Hashable:
    """Parameters used and held by the same coordinates may share a bucket."""
    holders = tuple(sorted({shard.holders for shard in placement.shards}))
    return placement.data_dim is None, placement.slices, holders
