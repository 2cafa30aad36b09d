"""What goes into programs over inner axes: weights, state and data of each slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist.config.idle_layouts import uncut_dim
from kdist.config.without_effect import WithoutEffect
from kdist.dtensor import relayout, sizes
from kdist.dtensor.sharded import Sharded, replicate
from kdist.program.batch import leading
from kdist.program.model_state import ModelState
from kdist.program.state import replica_seed
from kdist.sharding.dims import inner_dims
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Placement, coordinate_of, shape_of
from kdist.storage.fetched_table import FetchedTable
from kdist.storage.variables import Stored, stored

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class SliceInputs:
    """Reads the inputs of every slice's programs.

    Args:
        state: The model's variables.
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh as programs see it; an axis inside that cuts the batch cuts inputs.
        mesh: DTensor mesh of every slice.
        storage: The mesh as weights are stored on it, the same by default.
        tell_uncut: Told of batches that do not divide.
    """

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[Stored],
        topology: Topology,
        mesh: dtensor.Mesh,
        storage: Topology | None = None,
        tell_uncut: Callable[[Sequence[WithoutEffect]], None] = lambda notes: None,
    ) -> None:
        self.state = state
        self.entries = list(entries)
        self.fixed = [entry for v in state.fixed if (entry := stored(v)) is not None]
        self.topology, self.storage = topology, storage or topology
        self.places = topology.places_in(self.storage)
        self.mesh = mesh
        self.tell_uncut = tell_uncut

    def state_of(self, s: int, unread: Collection[int] = ()) -> tuple[list[Sharded], list[Sharded]]:
        """Parameters and carried state of slice `s`, read in the graph that is being traced.

        Args:
            s: The slice.
            unread: Positions of parameters of which only shapes are given.
        """
        devices = self.topology.slices[s].devices
        params = [
            self.described(e) if i in unread else self._stored(e, s, devices)
            for i, e in enumerate(self.entries)
        ]
        carried = [self._stored(e, s, devices) for e in self.fixed]
        carried += [self.value(v, s) for v in (*self.state.seeds, *self.state.metrics)]
        return params, carried

    def described_state(self) -> tuple[list[Sharded], list[Sharded]]:
        """What stands for the state of a slice where nothing runs: weights need no values yet."""
        devices = self.topology.slices[0].devices

        def of(entry: Stored) -> Sharded:
            rows = isinstance(entry, FetchedTable)  # a batch's, of a size of their own
            return self._stored(entry, 0, devices) if rows else self.described(entry)

        carried = [*map(of, self.fixed)]
        carried += [self.value(v, 0) for v in (*self.state.seeds, *self.state.metrics)]
        return [*map(of, self.entries)], carried

    def value(self, variable: keras.Variable, s: int) -> Sharded:
        """A variable's value on slice `s`, read in the graph that is being traced."""
        one = self.topology.slices[s]
        entry = stored(variable)
        if entry is not None:
            return self._stored(entry, s, one.devices)
        value = tf.convert_to_tensor(variable.value)
        if any(variable is seed for seed in self.state.seeds):
            value = replica_seed(value, one.index)
        return self._copies(value, one.devices)

    def data(self, data: Any) -> Any:
        """Data of a slice on its devices."""
        axis = self.topology.rows_axis
        if axis is not None:
            rows, size = leading(data).shape[0], self.mesh.dim_size(axis)
            if rows is None:
                sizes.require_multiples(size, rows=True)
            elif rows % size:
                self.tell_uncut([uncut_dim("the batch", 0, rows, size, [axis])])
        return keras.tree.map_structure(
            lambda t: None if t is None else part_of_batch(t, self.mesh, self.topology), data
        )

    def _stored(self, entry: Stored, s: int, devices: Sequence[str]) -> Sharded:
        parts = tuple(self._components(entry, s, devices))
        examples = None
        if isinstance(entry, FetchedTable) and not parts[0].shape.is_fully_defined():
            examples = sizes.following(functools.partial(entry.shape_at, s))
        return Sharded(parts, self._layout(entry.placement), examples)

    def described(self, entry: Stored) -> Sharded:
        """What stands for a parameter of which only the shape is looked at."""
        shapes = [shape_of(entry.placement.inner_index(k)) for _, k in self.places[0]]
        parts = tuple(tf.TensorSpec(shape, entry.variable.dtype) for shape in shapes)
        return Sharded(parts, self._layout(entry.placement))

    def _components(self, entry: Stored, s: int, devices: Sequence[str]) -> list[Any]:
        values, placement = [], entry.placement
        for (at, k), device in zip(self.places[s], devices, strict=True):
            own = at in placement.slices
            if not own:
                at = placement.home[self.storage.slices[at].index]
            with tf.device(device):
                value = entry.used_at((at, k))
                values.append(value if own else tf.identity(value))
        return values

    def _copies(self, value: Any, devices: Sequence[str]) -> Sharded:
        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.identity(value))
        return Sharded(tuple(copies), dtensor.Layout.replicated(self.mesh, value.shape.rank))

    def _layout(self, placement: Placement) -> dtensor.Layout:
        dims = inner_dims(placement.layout.dims, self.storage)
        return relayout.layout_for(self.mesh, dims, self.topology)


def part_of_batch(tensor: Any, mesh: dtensor.Mesh, topology: Topology) -> Sharded:
    """Data of a slice on its devices: cut by rows where these divide, if an axis cuts the batch.

    Args:
        tensor: With the rows of the slice as dim 0, or a scalar.
        mesh: DTensor's, of the slice.
        topology: The mesh as programs see it.
    """
    axis = topology.rows_axis
    tensor = tf.convert_to_tensor(tensor)
    if axis is None or tensor.shape.rank == 0:
        return replicate(tensor, mesh)
    size = mesh.dim_size(axis)
    if tensor.shape[0] is not None and tensor.shape[0] % size:
        return replicate(tensor, mesh)
    pieces = tf.split(tensor, size)
    coordinates = [coordinate_of(topology, 0, k)[axis] for k in range(mesh.size)]
    dims = [axis] + [dtensor.UNSHARDED] * (tensor.shape.rank - 1)
    layout = dtensor.Layout(dims, mesh)
    return Sharded(tuple(pieces[c] for c in coordinates), layout, sizes.examples(tensor))
