"""What goes into the programs of stages that have inner axes: weights and state of each slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.sharded import Sharded
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
    """Reads what every slice's stage uses.

    Args:
        state: The model's variables.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        mesh: DTensor mesh of every slice.
        used: Per stage, the variables that it uses.
    """

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[Stored],
        topology: Topology,
        mesh: dtensor.Mesh,
        used: Sequence[Sequence[keras.Variable]],
    ) -> None:
        super().__init__(state, entries, topology, mesh)
        self.used = used

    def values(self) -> list[dict[int, Sharded]]:
        """Per slice, by identity of the variable, its value, read in the graph being traced."""
        return [
            {id(v): self._value(v, s) for v in self.used[one.stage]}
            for s, one in enumerate(self.topology.slices)
        ]

    def _value(self, variable: keras.Variable, s: int) -> Sharded:
        """A variable's value on a slice."""
        one = self.topology.slices[s]
        if any(variable is seed for seed in self.state.seeds):
            value = tf.convert_to_tensor(variable.value)
            return self._copies(replica_seed(value, one.index), one.devices)
        entry = stored(variable)
        if entry is None:
            return self._copies(tf.convert_to_tensor(variable.value), one.devices)
        at = s if s in entry.placement.slices else entry.placement.home[one.index]
        return self._stored(entry, at, one.devices)


def used_by_stage(staged: StagedModel, bodies: Sequence[Any]) -> list[list[keras.Variable]]:
    """Per stage, the variables that its virtual stages use, each once."""
    found: list[dict[int, keras.Variable]] = [{} for _ in range(staged.schedule.num_stages)]
    for body in bodies:
        trainable = [body.program.state.trainable[i] for i in body.trainable]
        for v in (*trainable, *body.carried):
            found[staged.stage_of(body.virtual)][id(v)] = v
    return [list(one.values()) for one in found]
