"""Which parameters share a bucket: fusion settings read against one model and its optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kdist import _private
from kdist.fusion import FusionConfig, Item, assign_buckets, comm_fusion
from kdist.placement import Placement

import keras


class Fusing:
    """Gives every trainable parameter the key of its bucket.

    Args:
        config: The settings.
        variables: The trainable variables.
        placements: Where each is stored.
        apart: Positions of variables that are never fused: tables, whose gradients are rows.
    """

    def __init__(
        self,
        config: FusionConfig,
        variables: Sequence[keras.Variable],
        placements: Sequence[Placement],
        apart: frozenset[int],
    ) -> None:
        self.config = config
        self.variables = list(variables)
        self.placements = list(placements)
        self.apart = apart

    def __call__(self, groups: Sequence[tuple[Any, list[int]]]) -> list[Hashable | None]:
        """Keys of the buckets; see `kdist.optimizer.update.Fuse`."""
        rules: dict[int, Hashable] = {}
        for number, (leaf, members) in enumerate(groups):
            for v in members:
                decays = _private.decays(leaf, self.variables[v])
                rules[v] = (number, decays, str(self.variables[v].dtype))
        ids = comm_fusion.of(self.variables)
        items = [
            Item(p.nbytes, (rules[v], p.layout.dims if v in self.apart else _cut(p)), ids[v])
            for v, p in enumerate(self.placements)
        ]
        buckets = assign_buckets(items, self.config)
        return [None if v in self.apart else (bucket, rules[v]) for v, bucket in enumerate(buckets)]


def _cut(placement: Placement) -> Hashable:
    """Parameters held by the same coordinates may share a bucket."""
    return tuple(sorted({shard.holders for shard in placement.shards}))
