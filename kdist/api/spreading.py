"""How optimizer parallelism spreads parameters, by what their optimizer and the user say."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kdist.api.sharded_optimizer import parallel_optimizer
from kdist.config.compression import Classes, Compressor
from kdist.config.fusion import FusionConfig
from kdist.config.optimizer import OptimizerConfig
from kdist.optimizer.wrappers import optimizer_groups, whole_updates
from kdist.plan.fusion_groups import bucket_keys
from kdist.plan.partition import Spread, spread
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Placement
from kdist.storage.overwritten import overwritten

import keras


def spread_for(
    optimizer: Any,
    variables: Sequence[keras.Variable],
    placed: Sequence[Placement],
    config: OptimizerConfig,
    fusion: FusionConfig,
    topology: Topology,
    tables: frozenset[int],
    classes: Classes | None,
) -> Spread:
    """Spreads what an optimizer updates.

    Args:
        optimizer: The optimizer; None where there is none yet.
        variables: What it updates.
        placed: Where each of them is; see `kdist.plan.partition.decide`.
        config: Level and the rest.
        fusion: Which gradients travel together.
        topology: The mesh.
        tables: Positions of the variables that are tables of embeddings.
        classes: How gradients travel compressed, if they do.
    """
    whole = whole_updates(optimizer, variables)
    apart = tables | overwritten(variables)
    groups = optimizer_groups(optimizer, variables)
    kinds = {v: n for n, (_, members) in enumerate(groups) for v in members}
    how: Sequence[Compressor] = ["none"] * len(variables)
    if classes is not None:
        how = classes.compressors()

    def keys(placed: Sequence[Placement]) -> tuple[Hashable | None, ...]:
        return bucket_keys(fusion, variables, placed, groups, whole, apart, how)

    return spread(
        placed,
        whole,
        parallel_optimizer.of(variables),
        config,
        topology,
        keys,
        how,
        fusion,
        apart,
        [kinds.get(v, 0) for v in range(len(variables))],
    )
