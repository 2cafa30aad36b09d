"""The programs of a model as DTensor runs them: layouts of what comes in and goes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.dtensor import limits, relayout
from kdist.dtensor.model_layouts import ModelLayouts
from kdist.dtensor.partial_sums import summand
from kdist.program.logits import changed
from kdist.program.program import Program
from kdist.program.python_tapes import refuse_python_tapes
from kdist.program.recorded import both_passes
from kdist.program.vjp import differentiable
from kdist.sharding.dims import Dim, Dims, inner_dims
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Placement
from kdist.storage import sparse
from kdist.storage.variables import Stored

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class MeshPrograms:
    """Pure functions over DTensors; counterparts of those of `Program`.

    Args:
        program: The model's pure functions.
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh.
        layouts: The model's resolved layouts.
        want_outputs: Whether training and test steps must return the model's outputs.
        want_parts: Whether they must return every part of the loss.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Stored],
        topology: Topology,
        layouts: ModelLayouts,
        want_outputs: bool,
        want_parts: bool,
    ) -> None:
        self.program = program
        self.placements = [entry.placement for entry in entries]
        self.topology = topology
        self.want_outputs, self.want_parts = want_outputs, want_parts
        used = gathered_dims(layouts)
        self.gathered_params = positions(program.state.params, used)
        self.gathered_carried = positions(program.state.carried, used)

    def gradients(
        self, params: Any, carried: Any, data: Any, shares: Any, rows: Any, first: Any, scale: Any
    ) -> dict[str, Any]:
        """See `Program.loss_and_gradients`; gradients come in their parameters' layouts."""
        used, state = self._gather(params, carried)
        view = loss_view()
        result = self.program.loss_and_gradients(
            used, state, data, shares, rows, first, scale, view=view
        )
        result["gradients"] = self._all_laid_out(result["gradients"], params)
        return self._finish(result, params, carried, True)

    def collect(self, params: Any, carried: Any, x: Any, training: bool) -> dict[str, Any]:
        """See `Program.collect`."""
        used, state = self._gather(params, carried)
        result = self.program.collect(used, state, x, training)
        result["updated"] = self._laid_back(result["updated"], params, carried, training)
        return result

    def both_passes(
        self, params: Any, carried: Any, x: Any, cotangents: Any, added: Any
    ) -> dict[str, Any]:
        """See `kdist.program.recorded.both_passes`; gradients come in their parameters' layouts."""
        used, state = self._gather(params, carried)
        result = both_passes(self.program, like)(used, state, x, cotangents, added)
        result["gradients"] = self._all_laid_out(result["gradients"], params)
        result["updated"] = self._laid_back(result["updated"], params, carried, True)
        return result

    def losses(
        self, params: Any, carried: Any, data: Any, shares: Any, rows: Any, first: Any
    ) -> dict[str, Any]:
        """See `Program.loss`, in inference mode."""
        used, state = self._gather(params, carried)
        view = loss_view()
        result = self.program.loss(
            used, state, data, shares, rows, first, training=False, view=view
        )
        return self._finish(result, params, carried, False)

    def counts(self, params: Any, carried: Any, data: Any, rows: Any, training: bool) -> Any:
        """See `Program.counts`."""
        used, state = self._gather(params, carried)
        return self.program.counts(used, state, data, rows, training)

    def outputs(self, params: Any, carried: Any, x: Any) -> dict[str, Any]:
        """See `Program.infer`; outputs in whatever layout they have."""
        used, state = self._gather(params, carried)
        result = self.program.infer(used, state, x)
        result["updated"] = self._laid_back(result["updated"], params, carried, False)
        return result

    def probe(self, params: Any, carried: Any, x: Any) -> tuple[Any, list[Any]]:
        """A forward and backward pass without a loss, for `kdist.inspect`.

        The outputs are results too: no gradient needs them, and what makes them would be dropped.
        """
        used, state = self._gather(params, carried)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(used)
            outputs, _ = self.program.forward(used, state, x, training=True)
            leaves = [o for o in keras.tree.flatten(outputs) if o is not None]
            sums = [tf.math.real(tf.reduce_sum(o)) for o in leaves if differentiable(o)]
            target = tf.add_n([tf.cast(one, tf.float32) for one in sums])
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(target, used) if g is not None]
        return outputs, gradients

    def _all_laid_out(self, gradients: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        refuse_python_tapes()
        connected = self.program.trained.connected
        return [self._laid_out(g, i, params) for i, g in zip(connected, gradients, strict=True)]

    def _laid_out(self, gradient: Any, i: int, params: Sequence[Any]) -> Any:
        """A gradient in its parameter's layout; rows as (values, indices), cut by columns."""
        look_up = self.program.trained.rows.get(i)
        by_batch = look_up is not None and look_up.by_batch and not look_up.merged
        laid = laid_out(gradient, params[i], self.placements[i], self.topology, by_batch)
        return (laid.values, laid.indices) if sparse.is_sparse(laid) else laid

    def _gather(self, params: Sequence[Any], carried: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The weights in the layouts in which operations take them; see `gathered_dims`."""
        used, state = list(params), list(carried)
        for i, dims in self.gathered_params.items():
            used[i] = in_layout(params[i], dims)
        for i, dims in self.gathered_carried.items():
            state[i] = in_layout(carried[i], dims)
        return used, state

    def _finish(
        self, result: dict, params: Sequence[Any], carried: Sequence[Any], training: bool
    ) -> dict:
        result["updated"] = self._laid_back(result["updated"], params, carried, training)
        if not self.want_outputs:
            result["outputs"], result["masks"] = None, []
        if not self.want_parts:
            result["loss_parts"] = {}
        return result

    def _laid_back(
        self, updated: Sequence[Any], params: Sequence[Any], carried: Sequence[Any], training: bool
    ) -> list[Any]:
        """New state in the layouts in which the old came."""
        positions = self.program.traced(training).updated
        given = [*carried, *params]
        return [like(value, given[i]) for i, value in zip(positions, updated)]


def positions(variables: Sequence[keras.Variable], by_key: Mapping[int, Dims]) -> dict[int, Dims]:
    """Position -> layout of the variables whose identity has one in `by_key`."""
    return {i: by_key[id(v)] for i, v in enumerate(variables) if id(v) in by_key}


def whole_in_program(tensor: Any) -> Any:
    """Makes a tensor whole on every device of the slice that is being traced."""
    return in_layout(tensor, (None,) * tensor.shape.rank)


def in_layout(tensor: Any, dims: Dims) -> Any:
    """Lays a tensor out on the slice that is being traced."""
    trace = relayout.active()
    assert trace is not None
    return dtensor.relayout(tensor, relayout.layout_for(trace.mesh, dims, trace.topology))


def like(tensor: Any, other: Any) -> Any:
    """Lays a tensor out as another one is."""
    trace = relayout.active()
    assert trace is not None
    if trace.gather_first:
        tensor = whole_in_program(tensor)
    return dtensor.relayout_like(tensor, other)


def loss_view() -> Callable[[Any], Any] | None:
    """What a loss sees of the outputs: all of them where DTensor gets parts wrong.

    Its sparse cross-entropy over cut classes is exact in float32 and float16, and silently wrong in
    float64 and bfloat16.
    """
    if keras.config.floatx() in ("float32", "float16"):
        return None

    def whole(tensor: Any) -> Any:
        if tensor is None:
            return None
        seen = changed(tensor, whole_in_program)
        if keras_trainer.get_mask(tensor) is not None:
            keras_trainer.set_mask(seen, keras_trainer.get_mask(tensor))
        return seen

    return lambda outputs: keras.tree.map_structure(whole, outputs)


def laid_out(
    gradient: Any, param: Any, placement: Placement, topology: Topology, by_batch: bool = True
) -> Any:
    """A gradient in its parameter's layout; rows are cut by columns, and as the batch is.

    Args:
        gradient: The gradient, or rows of a table.
        param: The parameter.
        placement: Where that is.
        topology: The mesh.
        by_batch: Of rows, whether the batch decides which they are.
    """
    if not sparse.is_sparse(gradient):
        return summand(like(gradient, param))
    trace = relayout.active()
    assert trace is not None
    rows = _rows_of_batch(gradient, by_batch)
    indices = in_layout(gradient.indices, (rows,))
    values = whole_in_program(gradient.values) if trace.gather_first else gradient.values
    # Rows are of the whole table, whatever rows of it a device stores.
    values = in_layout(values, (rows, *inner_dims(placement.layout.dims, topology)[1:]))
    return tf.IndexedSlices(summand(values), indices, gradient.dense_shape)


def _rows_of_batch(gradient: Any, by_batch: bool) -> Dim:
    """The axis that cuts the rows of a table's gradient: that of the batch that looked them up."""
    trace = relayout.active()
    assert trace is not None
    axis, rows = trace.topology.rows_axis, gradient.values.shape[0]
    if axis is None or not by_batch:
        return None
    return axis if rows is None or rows % trace.topology.axis_size(axis) == 0 else None


def whole_readers(layouts: ModelLayouts) -> set[int]:
    """Identities of the cut weights that some layer's operations cannot take in parts."""
    layers: list[Any] = [
        layer for layer in layouts.model_layers if isinstance(layer, limits.GATHER_ON_READ)
    ]
    needed = {id(v) for layer in layers for v in layer.weights}
    needed -= {id(v) for one in layouts.convolutions_in_parts() for v in one.weights}
    return {key for key in needed if not layouts.weights[key].is_replicated}


def gathered_dims(layouts: ModelLayouts) -> dict[int, Dims]:
    """Layouts in which operations read weights, by identity, of those not stored so on a slice.

    They are whole, since some layer's operations cannot take parts.
    """
    return {key: (None,) * len(layouts.weights[key].dims) for key in whole_readers(layouts)}
