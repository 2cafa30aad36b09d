"""Running programs over DTensor: each slice is one mesh of the inner axes.

Weights stay plain per-device variables. A step reads them all in one `tf.function`, packs them
into DTensors, calls the lowered program of each slice, and unpacks gradients and statistics into
per-device tensors again. DTensor calls return before they are done, so the slices run at the same
time without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from kdist import _private, lowered, sparse, spmd
from kdist.batch import SplitBatch
from kdist.dims import Dims, axes_of, inner_dims
from kdist.hooks import declared_layouts
from kdist.lowered import Collective
from kdist.loss import shares_from_counts
from kdist.mesh import Topology
from kdist.placement import Index, Placement, UpdateUnit, coordinate_of, relative
from kdist.plain import add_gradients, part_of, row_shares
from kdist.program import Program
from kdist.state import replica_seed
from kdist.store import ModelLayouts
from kdist.variables import Stored, assemble, stored

PLAIN_RESULTS = ("loss", "terms", "outputs", "masks")
"""What a step needs as whole tensors."""


class CannotExpand(Exception):
    """The program has an operation that DTensor cannot run; carries which one."""


class Retrace(Exception):
    """The program must be traced again, with gradients gathered before they are cut."""


class Lowered:
    """One pure function, called with DTensors on any slice.

    Args:
        function: `function(*inputs)` over structures of tensors.
        layouts: Declared activation layouts.
        topology: The mesh.
        meshes: DTensor mesh of each slice.
        alltoall: Whether re-layouts may use all-to-all.
        paths: Paths of the model's layers, to say which layer causes a collective.
    """

    def __init__(
        self,
        function: Callable,
        layouts: ModelLayouts,
        topology: Topology,
        meshes: Sequence[dtensor.Mesh],
        alltoall: bool,
        paths: Sequence[str],
    ) -> None:
        self.function = function
        self.paths = list(paths)
        self.layouts = layouts
        self.topology = topology
        self.meshes = list(meshes)
        self.alltoall = alltoall
        self.traces: dict[Any, tf.types.experimental.ConcreteFunction] = {}
        self.captures: dict[Any, list[Any]] = {}
        self.facts: dict[Any, Any] = {}
        self.recorded: list[Collective] = []
        self.gather_first = False

    def __call__(self, s: int, key: Any, inputs: Any) -> Any:
        """Calls the function on slice `s`.

        Args:
            s: The slice.
            key: Signature of the inputs: shapes, dtypes, structure.
            inputs: Structure of DTensors on the slice's mesh.

        Returns:
            Structure of DTensors; not computed yet.
        """
        try:
            return self._call(s, key, inputs)
        except Retrace:
            self.gather_first = True
            self.traces.clear()
            self.captures.clear()
            return self._call(s, key, inputs)

    def _call(self, s: int, key: Any, inputs: Any) -> Any:
        concrete = self._trace(s, key, inputs)
        flat = [t for t in tf.nest.flatten(inputs, expand_composites=True) if t is not None]
        captures = self._packed_captures(s, key, concrete)
        with dtensor.default_mesh(self.meshes[s]):
            try:
                if (key, s) not in self.facts:
                    return self._first_call(s, key, concrete, flat, captures)
                return _private.call_flat(concrete, flat, captures)
            except (tf.errors.OpError, ValueError) as error:
                reason = spmd.explain(error)
                if reason is None:
                    raise
                raise CannotExpand(reason) from error

    def _first_call(self, s: int, key: Any, concrete: Any, flat: list, captures: list) -> Any:
        """Calls, lowering on the way, and reads which collectives that made."""
        with lowered.record() as recorder, spmd.lowering(self.meshes[s]):
            result = _private.call_flat(concrete, flat, captures)
        if s == 0:
            found = lowered.collectives(recorder, self.meshes[0], self.paths)
            if not self.alltoall:
                self._refuse_alltoall(found)
            self.recorded = self.recorded or found
        self.facts[key, s] = True
        return result

    def _refuse_alltoall(self, found: Sequence[Collective]) -> None:
        """Operations may cause all-to-alls of their own; then first without, else not at all.

        DTensor reads its switch once per process, so it cannot be told per model.
        """
        bad = [c for c in found if c.kind == "all-to-all"]
        if not bad:
            return
        if not self.gather_first:
            raise Retrace
        raise CannotExpand(
            f"operations of layer {bad[0].layer!r} without an all-to-all (their operands are cut "
            "along different dims; lay them out alike with kdist.shard, or set "
            "enable_alltoall=True)"
        )

    def _trace(self, s: int, key: Any, inputs: Any) -> Any:
        for at in ((key, None), (key, s)):
            if at in self.traces:
                return self.traces[at]
        specs = tf.nest.map_structure(tensor_spec, inputs)
        traced = tf.function(self.function, autograph=False)
        with (
            spmd.tracing(self.meshes[s], self.topology, alltoall=self.alltoall) as trace,
            declared_layouts(self.layouts),
        ):
            trace.gather_first = self.gather_first
            concrete = traced.get_concrete_function(*specs)
        bad = spmd.unsupported_ops(concrete.graph)
        if bad:
            raise CannotExpand(", ".join(f"{kind} ({name})" for kind, name in bad[:3]))
        # Explicit layouts name a mesh: such a trace serves one slice only.
        self.traces[key, s if trace.used else None] = concrete
        return concrete

    def _packed_captures(self, s: int, key: Any, concrete: Any) -> list[Any]:
        if (key, s) not in self.captures:
            packed = []
            for tensor in concrete.captured_inputs:
                if tensor.dtype == tf.resource:
                    raise CannotExpand(
                        "a variable that belongs to no layer of the model "
                        f"({getattr(tensor, 'name', tensor)})"
                    )
                packed.append(spmd.replicate(tensor, self.meshes[s]))
            self.captures[key, s] = packed
        return self.captures[key, s]


class SpmdRunner:
    """Runs a model's programs on DTensor meshes; the counterpart of `PlainRunner`.

    Args:
        program: The pure functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        layouts: The model's resolved layouts.
        alltoall: Whether re-layouts may use all-to-all.
        want_outputs: Whether training and test steps must return the model's outputs.
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
        batch_axis: str | None = None,
    ) -> None:
        self.program = program
        self.entries = list(entries)
        self.topology = topology
        self.layouts = layouts
        self.want_outputs = want_outputs
        self.batch_axis = batch_axis
        self.meshes = [spmd.make_mesh(one.devices, topology) for one in topology.slices]
        self.fixed = [stored(v) for v in program.state.fixed]
        self._reader: Callable | None = None
        self._gathered = gathered_positions(program, layouts)
        paths = [layer.path for layer in program.model._flatten_layers(include_self=False)]

        def make(function: Callable) -> Lowered:
            return Lowered(function, layouts, topology, self.meshes, alltoall, paths)

        self._gradients = make(self._gradient_program)
        self._losses = make(self._loss_program)
        self._counts = make(self._count_program)
        self._outputs = make(self._output_program)
        self._probe = make(self._probe_program)

    @property
    def devices(self) -> list[str]:
        """The device on which each slice's outputs arrive."""
        return [one.devices[0] for one in self.topology.slices]

    # -- programs: run inside DTensor functions ------------------------------------------------

    def _gradient_program(
        self, params: Any, carried: Any, data: Any, *rest: Any
    ) -> dict[str, Any]:
        used = self._gather(params)
        view = self._loss_view()
        result = self.program.loss_and_gradients(used, carried, data, *rest, view=view)
        result["gradients"] = [
            self._laid_out(g, i, params)
            for i, g in zip(self.program.trained.connected, result["gradients"])
        ]
        return self._finish(result, carried, True)

    def _loss_program(
        self, params: Any, carried: Any, data: Any, *rest: Any
    ) -> dict[str, Any]:
        used = self._gather(params)
        view = self._loss_view()
        result = self.program.loss(used, carried, data, *rest, training=False, view=view)
        return self._finish(result, carried, False)

    def _count_program(
        self, params: Any, carried: Any, data: Any, rows: Any
    ) -> Any:
        used = self._gather(params)
        return self.program.counts(used, carried, data, rows, training=True)

    def _output_program(self, params: Any, carried: Any, x: Any) -> Any:
        used = self._gather(params)
        outputs, _ = self.program.forward(used, carried, x, training=False)
        return outputs

    def _probe_program(self, params: Any, carried: Any, x: Any) -> list[Any]:
        """A forward and backward pass without a loss, for `kdist.inspect`."""
        used = self._gather(params)
        outputs = self.program.collect(used, carried, x, training=True)["outputs"]
        ones = [tf.ones_like(o) for o in keras.tree.flatten(outputs)]
        del outputs
        return self.program.cotangent_gradients(used, carried, x, ones, ())

    def _loss_view(self) -> Callable[[Any], Any] | None:
        """What a loss sees of the outputs: all of them where DTensor gets parts wrong.

        Its sparse cross-entropy over cut classes is exact in float32 and float16, and silently
        wrong in float64 and bfloat16.
        """
        if keras.config.floatx() in ("float32", "float16"):
            return None

        def whole(tensor: Any) -> Any:
            seen = whole_in_program(tensor)
            if _private.get_mask(tensor) is not None:
                _private.set_mask(seen, _private.get_mask(tensor))
            return seen

        return lambda outputs: keras.tree.map_structure(whole, outputs)

    def _laid_out(self, gradient: Any, i: int, params: Sequence[Any]) -> Any:
        """A gradient in its parameter's layout; rows as (values, indices), cut by columns."""
        if not sparse.is_sparse(gradient):
            return like(gradient, params[i])
        placement = self.entries[i].placement
        indices = whole_in_program(gradient.indices)
        if self._cut_by_rows(placement):
            return whole_in_program(gradient.values), indices
        return like(gradient.values, params[i]), indices

    def _cut_by_rows(self, placement: Placement) -> bool:
        return bool(axes_of(inner_dims(placement.layout.dims, self.topology)[0]))

    def _gather(self, params: Sequence[Any]) -> list[Any]:
        """Makes the weights whole that some layer's ops cannot take in parts."""
        return [whole_in_program(p) if i in self._gathered else p for i, p in enumerate(params)]

    def _finish(self, result: dict, carried: Sequence[Any], training: bool) -> dict:
        positions = self.program.traced(training).updated
        result["updated"] = [
            like(value, carried[i])
            for i, value in zip(positions, result["updated"])
        ]
        if not self.want_outputs:
            result["outputs"], result["masks"] = None, []
        return result

    # -- calls: eager --------------------------------------------------------------------------

    def gradients(self, batch: SplitBatch, scale: Any) -> list[dict[str, Any]]:
        """Loss and gradients of every slice; gradients and statistics as per-device lists."""
        scale = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
        return self._run(self._gradients, batch, (scale,))

    def losses(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Loss and outputs of every slice, in inference mode."""
        return self._run(self._losses, batch, ())

    def outputs(self, batch: SplitBatch) -> list[Any]:
        """Inference-mode outputs of every slice."""
        state = self._packed_state()
        calls = []
        for s in range(len(self.meshes)):
            x = self._pack_data(batch.parts[s][0], s)
            calls.append(self._outputs(s, signature(x), (*state[s], x)))
        return [keras.tree.map_structure(whole_value, one) for one in calls]

    def _run(self, program: Lowered, batch: SplitBatch, extra: tuple) -> list[dict[str, Any]]:
        state = self._packed_state()
        parts = [self._pack_data(part, s) for s, part in enumerate(batch.parts)]
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
            program._trace(0, key, (*state[0], parts[0], *numbers))
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
        packed = self._pack_data(x, 0)
        self._probe(0, signature(packed), (*self._packed_state()[0], packed))

    def gathered_paths(self) -> list[str]:
        """Weights that are made whole before use because an operation cannot take parts."""
        return [self.entries[i].placement.path for i in sorted(self._gathered)]

    # -- state ---------------------------------------------------------------------------------

    def _read_all(self) -> list[tuple[list, list]]:
        """Per slice, per variable, the value on each device of the slice."""
        everything = []
        for s, one in enumerate(self.topology.slices):
            params = [self._components(e, s, one.devices) for e in self.entries]
            carried = [
                self._components(e, s, one.devices) for e in self.fixed if e is not None
            ]
            for variable in self.program.state.seeds:
                seed = replica_seed(tf.convert_to_tensor(variable.value), s)
                carried.append(self._copies(seed, one.devices))
            for variable in self.program.state.metrics:
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

    def _packed_state(self) -> list[tuple[list, list]]:
        packed = []
        if self._reader is None:
            # Not a tf.function: its results would pass device 0, which orders reads and writes.
            self._reader = tf.compat.v1.wrap_function(self._read_all, [])
        for s, (params, carried) in enumerate(self._reader()):
            mesh = self.meshes[s]
            p = [
                spmd.pack(v, self._layout(mesh, e.placement))
                for v, e in zip(params, self.entries)
            ]
            c = []
            for i, value in enumerate(carried):
                if i < len(self.fixed):
                    layout = self._layout(mesh, self.fixed[i].placement)
                else:
                    layout = dtensor.Layout.replicated(mesh, value[0].shape.rank)
                c.append(spmd.pack(value, layout))
            packed.append((p, c))
        return packed

    def _layout(self, mesh: dtensor.Mesh, placement: Placement) -> dtensor.Layout:
        dims: Dims = inner_dims(placement.layout.dims, self.topology)
        return spmd.layout_for(mesh, dims, self.topology)

    def _pack_data(self, data: Any, s: int) -> Any:
        pack = lambda t: None if t is None else self._pack_leaf(t, s)  # noqa: E731
        return keras.tree.map_structure(pack, data)

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

    # -- what the update reads -----------------------------------------------------------------

    def gradient_at(self, results: Sequence[Sequence[Any]]) -> Callable[[int, UpdateUnit], Any]:
        """How the update reads gradients: the unit's part of each slice's, summed."""
        where = {v: j for j, v in enumerate(self.program.trained.connected)}
        rows = self.program.trained.rows

        def at(variable: int, k: int, index: Index | None) -> Any:
            """Sum over slices of what their inner coordinate `k` has of the part at `index`."""
            placement = self.entries[variable].placement
            parts = []
            for s, slices in enumerate(results):
                with tf.device(self.topology.slices[s].devices[k]):
                    part = self._as_gradient(slices[where[variable]][k], placement, k)
                    if index is not None:
                        base = self._base(variable, k)
                        shape = [b.stop - b.start for b in base]
                        part = part_of(part, relative(index, base), shape)
                    parts.append(part)
            return add_gradients(parts, rows.get(variable, True))

        def reduced(variable: int, unit: UpdateUnit) -> Any:
            placement = self.entries[variable].placement
            if unit.shard is not None:
                return at(variable, unit.owner[1], placement.shards[unit.shard].index)
            if variable not in rows:
                return whole_of(placement, lambda k: at(variable, k, None))
            if self._cut_by_rows(placement):
                return at(variable, 0, None)
            return self._join_columns(placement, lambda k: at(variable, k, None))

        return reduced

    def _base(self, variable: int, k: int) -> Index:
        """The part of a variable that a gradient at inner coordinate `k` is of."""
        placement = self.entries[variable].placement
        index = placement.inner_index(k)
        if variable in self.program.trained.rows:
            # Rows are of the whole table, whatever rows of it the coordinate stores.
            return (slice(0, placement.shape[0]), *index[1:])
        return index

    def _as_gradient(self, part: Any, placement: Placement, k: int) -> Any:
        if not isinstance(part, tuple | list):
            return part
        values, indices = part
        columns = [int(n) for n in values.shape[1:]]
        shape = tf.constant([placement.shape[0], *columns], indices.dtype)
        return tf.IndexedSlices(values, indices, shape)

    @staticmethod
    def _join_columns(placement: Placement, part: Callable[[int], Any]) -> Any:
        """Rows of the whole table from rows of its column blocks."""
        rows = part(0)
        if len({tuple(i.start for i in placement.inner_index(k)) for k in range(
            len(placement.table[0]))}) == 1:
            return rows
        whole = placement.shape[1:]
        count = tf.shape(rows.values)[0]
        blocks = {}
        for k in range(len(placement.table[0])):
            index = placement.inner_index(k)[1:]
            blocks.setdefault(tuple(i.start for i in index), (index, k))
        parts = [
            ((slice(0, 1), *index), part(k).values) for index, k in blocks.values()
        ]
        values = tf.reshape(assemble(parts), [count, *whole])
        return tf.IndexedSlices(values, rows.indices, tf.constant(placement.shape, rows.indices.dtype))

    def updated_whole(self, updated: Sequence[Any], training: bool) -> list[Any]:
        """Statistics as whole tensors, from what `_unpacked` made of them."""
        values = []
        for position, parts in zip(self.program.traced(training).updated, updated):
            if position < len(self.fixed):
                placement = self.fixed[position].placement
                values.append(whole_of(placement, lambda k, parts=parts: parts[k]))
            else:
                values.append(parts[0])
        return values


def whole_of(placement: Placement, part: Callable[[int], Any]) -> Any:
    """Assembles a tensor from the distinct parts that the inner coordinates of a slice hold."""
    found: dict[tuple[int, ...], Any] = {}
    for k in range(len(placement.table[0])):
        index = placement.inner_index(k)
        key = tuple(i.start for i in index)
        if key not in found:
            found[key] = (index, part(k))
    return assemble(list(found.values()))


def whole_in_program(tensor: Any) -> Any:
    """Makes a tensor whole on every device of the slice that is being traced."""
    trace = spmd.active()
    assert trace is not None
    trace.used = True
    return dtensor.relayout(tensor, dtensor.Layout.replicated(trace.mesh, tensor.shape.rank))


def like(tensor: Any, other: Any) -> Any:
    """Lays a tensor out as another one is."""
    trace = spmd.active()
    assert trace is not None
    if trace.gather_first:
        tensor = whole_in_program(tensor)
    return dtensor.relayout_like(tensor, other)


def whole_value(tensor: Any) -> Any:
    """The value of a DTensor as one plain tensor; None stays None.

    Parts are fetched to the slice's first device, which alone needs them.
    """
    if tensor is None:
        return None
    layout = dtensor.fetch_layout(tensor)
    parts = dtensor.unpack(tensor)
    if layout.is_fully_replicated():
        return parts[0]
    found: dict[tuple[int, ...], tuple[Index, Any]] = {}
    for part, where in zip(parts, layout.mesh.local_device_locations()):
        index = []
        for dim, size in enumerate(part.shape):
            axis = layout.sharding_specs[dim]
            start = 0 if axis == dtensor.UNSHARDED else where[axis] * size
            index.append(slice(start, start + size))
        found[tuple(i.start for i in index)] = (tuple(index), part)
    with tf.device(parts[0].device):
        return assemble(list(found.values()))


def signature(data: Any) -> tuple:
    """Hashable shapes and dtypes of a structure of tensors."""
    leaves = tf.nest.flatten(data)
    return tuple(None if t is None else (tuple(t.shape), t.dtype.name) for t in leaves)


def gathered_positions(program: Program, layouts: ModelLayouts) -> frozenset[int]:
    """Positions of trainable weights that their layer's ops cannot take in parts."""
    position = {id(v): i for i, v in enumerate(program.state.trainable)}
    found = set()
    for layer in program.model._flatten_layers():
        if isinstance(layer, spmd.GATHER_ON_READ):
            for v in layer.trainable_weights:
                if id(v) in position and not layouts.weights[id(v)].is_replicated:
                    found.add(position[id(v)])
    return frozenset(found)


def tensor_spec(tensor: Any) -> Any:
    """Spec of a tensor; None stays None."""
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
