"""How the update reads a pipeline's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import sparse
from kdist.mesh import Topology
from kdist.placement import Coordinate, Index, UpdateUnit
from kdist.plain import add_gradients, part_of
from kdist.program import Traced
from kdist.variables import Stored

import tensorflow as tf


def shape_of(index: Index) -> tuple[int, ...]:
    """Shape of the part of a variable at `index`."""
    return tuple(i.stop - i.start for i in index)


class PipelineGradients:
    """Gradients per slice; see `kdist.optimizer.source.GradientSource`.

    A weight that several stages use has a gradient on each of them; they are summed like those of
    replicas.

    Args:
        results: Per replica, per slice of it, the gradients by trainable variable.
        traced: What tracing the training program taught.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
    """

    def __init__(
        self,
        results: Sequence[dict[int, dict[int, Any]]],
        traced: Traced,
        entries: Sequence[Stored],
        topology: Topology,
    ) -> None:
        self.gradients = {s: found for replica in results for s, found in replica.items()}
        self.traced = traced
        self.entries = list(entries)
        self.topology = topology

    @property
    def rows(self) -> set[int]:
        """See `GradientSource`."""
        return set(self.traced.rows)

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        placement = self.entries[variable].placement
        parts = []
        for s in placement.slices:
            gradient = self.gradients.get(s, {}).get(variable)
            if gradient is None:
                continue
            if unit.shard is not None:
                with tf.device(self.topology.slices[s].devices[0]):
                    gradient = part_of(gradient, unit.index(placement), placement.shape)
            parts.append(gradient)
        total = add_gradients(parts, self.traced.rows.get(variable, sparse.LookUp()))
        self.reduced([variable], total)
        return total

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        placement = self.entries[variable].placement
        if at[0] not in placement.slices:
            return None
        index = placement.inner_index(at[1])
        gradient = self.gradients.get(at[0], {}).get(variable)
        if gradient is None:  # of a tied weight, on a stage through which no gradient flows
            return tf.zeros(shape_of(index), self.entries[variable].variable.dtype)
        return part_of(tf.convert_to_tensor(gradient), index, placement.shape)

    def reduced(self, variables: Sequence[int], gradient: Any) -> None:
        """See `GradientSource`."""
