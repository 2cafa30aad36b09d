"""Where the update reads gradients from: what the slices computed, summed as the update asks."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

from kdist.optimizer.routed import summed
from kdist.plan.bucket import Bucket
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate

import tensorflow as tf

REDUCE = "reduce"
"""Name of the sums over the slices, in graphs and in profiles."""


class GradientSource(Protocol):
    """The gradients of one step."""

    @property
    def rows(self) -> set[int]:
        """Trainable variables whose gradient is rows of a table."""

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """A unit's part, summed over the slices, on the device in scope."""

    def local(self, variable: int, at: Coordinate) -> Any:
        """What one coordinate computed: dense, of the part it computes with; None if nothing."""


def bucket_gradients(
    bucket: Bucket,
    source: GradientSource,
    topology: Topology,
    live: Container[int] | None = None,
) -> list[Any]:
    """A bucket's gradients, summed over the slices: per owner, its vector.

    Args:
        bucket: The bucket.
        source: The gradients.
        topology: The mesh.
        live: Members that have a gradient; None if all have. Others' are zeros.
    """
    k = bucket.inner
    messages, sources = [], []
    for s in range(len(topology.slices)):
        device = topology.device((s, k))
        with tf.device(device):
            has = [live is None or v in live for v in bucket.members]
            tensors = [source.local(v, (s, k)) if h else None for v, h in zip(bucket.members, has)]
            if found := [t for t in tensors if t is not None]:
                dtype = tf.convert_to_tensor(found[0]).dtype
                dense = [
                    tf.zeros(shape, dtype) if t is None else t
                    for t, shape in zip(tensors, bucket.shapes)
                ]
                messages.append(bucket.messages(dense))
                sources.append(device)
    vectors = []
    for p, owner in enumerate(bucket.owners):
        at, parts = topology.device(owner), [rows[p] for rows in messages]
        if len(parts) > 1:
            vectors.append(summed(parts, sources, at, bucket.algorithm, REDUCE, p))
            continue
        with tf.device(at):
            vectors.append(tf.identity(parts[0]))
    return vectors
