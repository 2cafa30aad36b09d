"""What goes into DTensor programs: weights, state and data of each slice, packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist import spmd
from kdist.batch import leading
from kdist.dims import inner_dims
from kdist.mesh import Topology
from kdist.placement import Placement, coordinate_of
from kdist.program import ModelState
from kdist.state import replica_seed
from kdist.variables import Stored, stored
from kdist.without_effect import WithoutEffect, uncut_dim

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class SliceInputs:
    """Reads and packs the inputs of every slice's programs.

    Args:
        state: The model's variables.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        meshes: DTensor mesh of each slice.
        batch_axis: Inner axis that cuts the batch of the inputs, if any.
        tell_uncut: Told of batches that it does not divide.
    """

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[Stored],
        topology: Topology,
        meshes: Sequence[dtensor.Mesh],
        batch_axis: str | None = None,
        tell_uncut: Callable[[Sequence[WithoutEffect]], None] = lambda notes: None,
    ) -> None:
        self.state = state
        self.entries = list(entries)
        self.fixed = [entry for v in state.fixed if (entry := stored(v)) is not None]
        self.topology = topology
        self.meshes = list(meshes)
        self.batch_axis = batch_axis
        self.tell_uncut = tell_uncut
        self._reader: Callable | None = None

    def packed_state(self) -> list[tuple[list, list]]:
        """Per slice, parameters and carried state as DTensors."""
        if self._reader is None:
            # Not a tf.function: its results would pass device 0, which orders reads and writes.
            self._reader = tf.compat.v1.wrap_function(self._read_all, [])
        packed = []
        for mesh, (params, carried) in zip(self.meshes, self._reader()):
            p = [
                spmd.pack(v, self._layout(mesh, e.placement)) for v, e in zip(params, self.entries)
            ]
            split = len(self.fixed)
            c = [
                spmd.pack(v, self._layout(mesh, e.placement))
                for v, e in zip(carried[:split], self.fixed)
            ]
            c += [
                spmd.pack(v, dtensor.Layout.replicated(mesh, v[0].shape.rank))
                for v in carried[split:]
            ]
            packed.append((p, c))
        return packed

    def packed_data(self, data: Any, s: int) -> Any:
        """Data of slice `s` on its devices."""
        if self.batch_axis is not None:
            rows, size = leading(data).shape[0], self.meshes[s].dim_size(self.batch_axis)
            if rows % size:
                self.tell_uncut([uncut_dim("the batch", 0, rows, size, [self.batch_axis])])
        return keras.tree.map_structure(
            lambda t: None if t is None else self._pack_leaf(t, s), data
        )

    def _read_all(self) -> list[tuple[list, list]]:
        """Per slice, per variable, the value on each device of the slice."""
        everything = []
        for s, one in enumerate(self.topology.slices):
            params = [self._components(e, s, one.devices) for e in self.entries]
            carried = [self._components(e, s, one.devices) for e in self.fixed]
            for variable in self.state.seeds:
                seed = replica_seed(tf.convert_to_tensor(variable.value), s)
                carried.append(self._copies(seed, one.devices))
            for variable in self.state.metrics:
                carried.append(self._copies(tf.convert_to_tensor(variable.value), one.devices))
            everything.append((params, carried))
        return everything

    def _components(self, entry: Stored, s: int, devices: Sequence[str]) -> list[Any]:
        values = []
        for k, device in enumerate(devices):
            with tf.device(device):
                values.append(tf.identity(entry.used_at((s, k))))
        return values

    @staticmethod
    def _copies(value: Any, devices: Sequence[str]) -> list[Any]:
        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.identity(value))
        return copies

    def _layout(self, mesh: dtensor.Mesh, placement: Placement) -> dtensor.Layout:
        dims = inner_dims(placement.layout.dims, self.topology)
        return spmd.layout_for(mesh, dims, self.topology)

    def _pack_leaf(self, tensor: Any, s: int) -> Any:
        """Data of a slice on its devices: the batch cut over `batch_axis` where it divides."""
        mesh = self.meshes[s]
        axis = self.batch_axis
        tensor = tf.convert_to_tensor(tensor)
        if axis is None or tensor.shape.rank == 0:
            return spmd.replicate(tensor, mesh)
        size = mesh.dim_size(axis)
        if tensor.shape[0] % size:
            return spmd.replicate(tensor, mesh)
        pieces = tf.split(tensor, size)
        coordinates = [coordinate_of(self.topology, 0, k)[axis] for k in range(mesh.size)]
        dims = [axis] + [dtensor.UNSHARDED] * (tensor.shape.rank - 1)
        return spmd.pack([pieces[c] for c in coordinates], dtensor.Layout(dims, mesh))
