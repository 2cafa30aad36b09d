"""How the update reads the gradients of a pipeline whose stages are DTensor meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist import sparse
from kdist.mesh import Topology
from kdist.placement import Coordinate, Index, relative, shape_of
from kdist.plain import add_gradients, part_of
from kdist.program import Traced
from kdist.spmd_results import SliceGradients, as_gradient
from kdist.variables import Stored

import tensorflow as tf


class MeshPipelineGradients(SliceGradients):
    """Gradients per slice, of the stages that use a variable; see `SliceGradients`.

    Args:
        results: Per replica, what `MeshFlow` gives per slice and trainable variable.
        traced: What tracing the training program taught.
        look_ups: By (trainable variable, virtual stage), how its rows are looked up.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
    """

    def __init__(
        self,
        results: Sequence[Mapping[int, Mapping[int, Mapping[str, Any]]]],
        traced: Traced,
        look_ups: Mapping[tuple[int, int], sparse.LookUp],
        entries: Sequence[Stored],
        topology: Topology,
    ) -> None:
        super().__init__([], traced, [entry.placement for entry in entries], topology)
        self._entries, self._of_rows = list(entries), look_ups
        self.parts: dict[int, dict[int, list[Any]]] = {}
        for replica in results:
            for s, found in replica.items():
                self.parts[s] = {v: self._put_together(s, v, one) for v, one in found.items()}

    def _put_together(self, s: int, variable: int, one: Mapping[str, Any]) -> list[Any]:
        """One gradient per device of a slice, of all its micro-batches."""
        found = []
        for k, device in enumerate(self.topology.slices[s].devices):
            with tf.device(device):
                tables = [
                    self._table(variable, k, virtual, pairs)
                    for virtual, pairs in one.get("rows", {}).items()
                ]
                dense = [one["dense"][k]] if "dense" in one else []
                found.append(sparse.joined([*dense, *tables]))
        return found

    def _table(self, variable: int, k: int, virtual: int, pairs: Sequence[Any]) -> Any:
        """Rows of all micro-batches; dense, of the stored part, if others are dense."""
        placement = self.placements[variable]
        look_up = self._of_rows[variable, virtual]
        rows = [as_gradient(tuple(pair[k]), placement) for pair in pairs]
        total = sparse.add(rows, look_up.by_batch, look_up.merged)
        if variable in self.rows:
            return total
        return tf.convert_to_tensor(total)[placement.inner_index(k)[0]]

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `kdist.optimizer.source.GradientSource`."""
        s, k = at
        if s not in self.placements[variable].slices:
            return None
        found = self.parts.get(s, {}).get(variable)
        if found is None:  # of a tied weight, on a stage through which no gradient flows
            index = self.placements[variable].inner_index(k)
            return tf.zeros(shape_of(index), self._entries[variable].variable.dtype)
        return found[k]

    def _at(self, variable: int, k: int, index: Index | None) -> Any:
        """Sum over the slices of the variable's stages; see `SliceGradients`."""
        parts = []
        for s in self.placements[variable].slices:
            found = self.parts.get(s, {}).get(variable)
            if found is None:
                continue
            part = found[k]
            if index is not None:
                with tf.device(self.topology.slices[s].devices[k]):
                    base = self._base(variable, k)
                    part = part_of(part, relative(index, base), shape_of(base))
            parts.append(part)
        return add_gradients(parts, self.look_ups.get(variable, sparse.LookUp()))
