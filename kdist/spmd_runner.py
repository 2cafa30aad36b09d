"""Running programs over DTensor: each slice is one mesh of the inner axes.

Weights stay plain per-device variables. A step reads them all in one graph, packs them into
DTensors (`spmd_inputs`), calls the lowered program of each slice (`spmd_call`, `spmd_program`),
and unpacks gradients and statistics into per-device tensors again (`spmd_results`). DTensor calls
return before they are done, so the slices need no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist import spmd
from kdist.batch import SplitBatch
from kdist.loss import shares_from_counts
from kdist.lowered import Collective
from kdist.mesh import Topology
from kdist.parts import whole_of
from kdist.plain import row_shares
from kdist.program import Program
from kdist.spmd_call import Lowered, signature
from kdist.spmd_inputs import SliceInputs
from kdist.spmd_program import SpmdPrograms
from kdist.spmd_results import SliceGradients, whole_value
from kdist.store import ModelLayouts
from kdist.variables import Stored

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

PLAIN_RESULTS = ("loss", "terms", "loss_parts", "outputs", "masks")
"""What a step needs as whole tensors."""


class SpmdRunner:
    """Runs a model's programs on DTensor meshes; the counterpart of `PlainRunner`.

    Args:
        program: The pure functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        layouts: The model's resolved layouts.
        alltoall: Whether re-layouts may use all-to-all.
        want_outputs: Whether training and test steps must return the model's outputs.
        want_parts: Whether they must return every part of the loss.
        batch_axis: Inner axis that cuts the batch of the inputs, if any.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Stored],
        topology: Topology,
        layouts: ModelLayouts,
        *,
        alltoall: bool,
        want_outputs: bool,
        want_parts: bool,
        batch_axis: str | None = None,
    ) -> None:
        self.program = program
        self.entries = list(entries)
        self.topology = topology
        self.meshes = [spmd.make_mesh(one.devices, topology) for one in topology.slices]
        self.inputs = SliceInputs(
            program.state, entries, topology, self.meshes, batch_axis, layouts.tell_uncut
        )
        self.programs = SpmdPrograms(program, entries, topology, layouts, want_outputs, want_parts)
        paths = [
            layer.path or layer.name for layer in layouts.model_layers if layer is not program.model
        ]

        def make(function: Callable) -> Lowered:
            return Lowered(function, layouts, topology, self.meshes, alltoall, paths)

        self._gradients = make(self.programs.gradients)
        self._losses = make(self.programs.losses)
        self._counts = make(self.programs.counts)
        self._outputs = make(self.programs.outputs)
        self._probe = make(self.programs.probe)

    @property
    def devices(self) -> list[str]:
        """The device on which each slice's outputs arrive."""
        return [one.devices[0] for one in self.topology.slices]

    def gradients(self, batch: SplitBatch, scale: Any) -> list[dict[str, Any]]:
        """Loss and gradients of every slice; gradients and statistics as per-device lists."""
        scale = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
        return self._run(self._gradients, batch, (scale,))

    def losses(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Loss and outputs of every slice, in inference mode."""
        return self._run(self._losses, batch, ())

    def outputs(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """See `PlainRunner.outputs`; state as per-device lists."""
        state = self.inputs.packed_state()
        calls = []
        for s in range(len(self.meshes)):
            x = self.inputs.packed_data(batch.parts[s][0], s)
            calls.append(self._outputs(s, signature(x), (*state[s], x)))
        return [
            {
                "outputs": keras.tree.map_structure(whole_value, one["outputs"]),
                "updated": [dtensor.unpack(u) for u in one["updated"]],
            }
            for one in calls
        ]

    def _run(self, program: Lowered, batch: SplitBatch, extra: tuple) -> list[dict[str, Any]]:
        state = self.inputs.packed_state()
        parts = [self.inputs.packed_data(part, s) for s, part in enumerate(batch.parts)]
        rows = row_shares(batch)
        shares = self._shares(program, state, parts, batch, rows)
        calls = []
        for s, mesh in enumerate(self.meshes):
            first = tf.constant(float(s == 0), tf.float64)
            numbers = [spmd.replicate(t, mesh) for t in (shares[s], rows[s], first, *extra)]
            inputs = (*state[s], parts[s], *numbers)
            calls.append(program(s, signature(parts[s]), inputs))
        return [self._unpacked(result) for result in calls]

    def _shares(
        self, program: Lowered, state: Any, parts: Any, batch: SplitBatch, rows: Sequence[Any]
    ) -> list[Any]:
        """Each slice's share of every loss term; see `kdist.loss`."""
        shares = [tf.fill([len(self.program.kinds)], row) for row in rows]
        if len(parts) == 1 or not self.program.kinds:
            return shares
        key = signature(parts[0])
        if (key, "by_data") not in program.facts:
            mesh = self.meshes[0]
            numbers = [spmd.replicate(t, mesh) for t in (shares[0], rows[0], rows[0])]
            if program is self._gradients:
                numbers.append(spmd.replicate(tf.constant(1.0), mesh))
            program.trace(0, key, (*state[0], parts[0], *numbers))
            training = program is self._gradients
            program.facts[key, "by_data"] = self.program.traced(training).counts_by_data
        if not program.facts[key, "by_data"]:
            return shares
        counts = []
        for s, mesh in enumerate(self.meshes):
            inputs = (*state[s], parts[s], spmd.replicate(batch.counts[s], mesh))
            counts.append(self._counts(s, signature(parts[s]), inputs))
        return shares_from_counts([whole_value(c) for c in counts])

    def _unpacked(self, result: dict[str, Any]) -> dict[str, Any]:
        out = {k: keras.tree.map_structure(whole_value, result[k]) for k in PLAIN_RESULTS}
        out["gradients"] = [
            list(zip(*map(dtensor.unpack, g))) if isinstance(g, tuple) else dtensor.unpack(g)
            for g in result.get("gradients", [])
        ]
        out["updated"] = [dtensor.unpack(u) for u in result["updated"]]
        return out

    def recorded(self) -> list[Collective]:
        """Collectives of the lowered training program, or of what stands for it."""
        return self._gradients.recorded or self._probe.recorded

    def lower_without_loss(self, x: Any) -> None:
        """Lowers a forward and backward pass on slice 0, to see its collectives."""
        packed = self.inputs.packed_data(x, 0)
        self._probe(0, signature(packed), (*self.inputs.packed_state()[0], packed))

    def gathered_paths(self) -> list[str]:
        """Weights that are gathered before use because an operation cannot take such parts."""
        state = self.program.state
        trainable = [state.trainable[i].path for i in sorted(self.programs.gathered_params)]
        return trainable + [state.carried[i].path for i in sorted(self.programs.gathered_carried)]

    def order_backward(self) -> None:
        """Nothing to order: slices' programs are done when the update is traced."""

    def gradient_at(self, results: Sequence[Sequence[Any]]) -> SliceGradients:
        """How the update reads gradients: the unit's part of each slice's, summed."""
        placements = [entry.placement for entry in self.entries]
        return SliceGradients(results, self.program.trained, placements, self.topology)

    def updated_whole(self, updated: Sequence[Any], training: bool) -> list[Any]:
        """Statistics as whole tensors, from what `_unpacked` made of them."""
        placements = {i: entry.placement for i, entry in enumerate(self.inputs.fixed)}
        after = len(self.program.state.carried)
        placements |= {after + i: entry.placement for i, entry in enumerate(self.entries)}
        return [
            whole_of(placements[i], parts.__getitem__) if i in placements else parts[0]
            for i, parts in zip(self.program.traced(training).updated, updated)
        ]
