"""What goes into the stages' DTensor programs: weights and state of each slice, packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import spmd
from kdist.mesh import Topology
from kdist.pipeline.stages import StagedModel
from kdist.program import ModelState
from kdist.spmd_inputs import SliceInputs
from kdist.state import replica_seed
from kdist.variables import Stored, stored

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class StageInputs(SliceInputs):
    """Reads and packs what every slice's stage uses.

    Args:
        state: The model's variables.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        meshes: DTensor mesh of each slice.
        used: Per stage, the variables that it uses.
    """

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[Stored],
        topology: Topology,
        meshes: Sequence[dtensor.Mesh],
        used: Sequence[Sequence[keras.Variable]],
    ) -> None:
        super().__init__(state, entries, topology, meshes)
        self.used = used

    def packed(self) -> list[dict[int, Any]]:
        """Per slice, by identity of the variable, its value as a DTensor."""
        if self._reader is None:
            # Not a tf.function: its results would pass device 0, which orders reads and writes.
            self._reader = tf.compat.v1.wrap_function(self._read_used, [])
        found = []
        for one, mesh, values in zip(self.topology.slices, self.meshes, self._reader()):
            found.append(
                {
                    id(v): spmd.pack(parts, self._layout_of(v, mesh, parts))
                    for v, parts in zip(self.used[one.stage], values)
                }
            )
        return found

    def _layout_of(self, variable: keras.Variable, mesh: Any, parts: Sequence[Any]) -> Any:
        entry = stored(variable)
        if entry is None:
            return dtensor.Layout.replicated(mesh, parts[0].shape.rank)
        return self._layout(mesh, entry.placement)

    def _read_used(self) -> list[list[list[Any]]]:
        return [
            [self._parts(v, s) for v in self.used[one.stage]]
            for s, one in enumerate(self.topology.slices)
        ]

    def _parts(self, variable: keras.Variable, s: int) -> list[Any]:
        """A variable's value on each device of a slice."""
        one = self.topology.slices[s]
        if any(variable is seed for seed in self.state.seeds):
            value = tf.convert_to_tensor(variable.value)
            return self._copies(replica_seed(value, one.index), one.devices)
        entry = stored(variable)
        if entry is None:
            return self._copies(tf.convert_to_tensor(variable.value), one.devices)
        at = s if s in entry.placement.slices else entry.placement.home[one.index]
        return self._components(entry, at, one.devices)


def used_by_stage(staged: StagedModel, bodies: Sequence[Any]) -> list[list[keras.Variable]]:
    """Per stage, the variables that its virtual stages use, each once."""
    found: list[dict[int, keras.Variable]] = [{} for _ in range(staged.schedule.num_stages)]
    for body in bodies:
        trainable = [body.program.state.trainable[i] for i in body.trainable]
        for v in (*trainable, *body.carried):
            found[staged.stage_of(body.virtual)][id(v)] = v
    return [list(one.values()) for one in found]


def moved(tensor: Any, mesh: dtensor.Mesh) -> Any:
    """A DTensor on another slice's mesh, cut as it was: every device sends its part to its peer."""
    layout = dtensor.fetch_layout(tensor)
    if layout.mesh == mesh:
        return tensor
    parts = dtensor.unpack(tensor)
    return spmd.pack(parts, dtensor.Layout(layout.sharding_specs, mesh))
