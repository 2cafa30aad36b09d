"""What kdist knows about DTensor: meshes, layouts, re-layouts, and what DTensor cannot run.

A slice's mesh has the inner axes only. Programs are pure functions over DTensors; see
`kdist.dtensor.lowered` for reading what DTensor made of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat import keras_trainer, said_shapes
from kdist.config.idle_layouts import uncut_dim
from kdist.config.without_effect import WithoutEffect
from kdist.dtensor import sizes
from kdist.dtensor.lowered import mesh_dim
from kdist.dtensor.lowering import abstract_mesh
from kdist.program.logits import changed
from kdist.sharding.active import laying_out
from kdist.sharding.dims import Dim, Dims, axes_of, cut_of, inner_dims
from kdist.sharding.merged_axes import inner_axes_of
from kdist.sharding.mesh import Topology
from kdist.sharding.strategy import parse_strategy

import tensorflow as tf
from tensorflow.experimental import dtensor

ALLTOALL_SWITCH = "DTENSOR_USE_ALL_TO_ALL_RELAYOUT"
GATHER_SWITCH = "LOWER_DTENSOR_GATHER_TO_COLLECTIVE_GATHER_V2"


@dataclasses.dataclass
class SliceTrace:
    """A program that is being traced for a slice.

    Attributes:
        mesh: The DTensor mesh of a slice.
        topology: The whole mesh.
        alltoall: Whether re-layouts may use all-to-all.
        gather_first: Whether gradients are made whole before they are cut like their parameters,
            so that no all-to-all moves a cut from one dim to another.
        uncut: Declared cuts that were left out because a dim does not divide.
        cut_over: The inner axes over which tensors were cut by declaration.
        along_sequence: Whether a tensor between cut products was to be cut along the sequence.
    """

    mesh: dtensor.Mesh
    topology: Topology
    alltoall: bool
    gather_first: bool = False
    uncut: list[WithoutEffect] = dataclasses.field(default_factory=list)
    cut_over: set[str] = dataclasses.field(default_factory=set)
    along_sequence: bool = False


class _Traces(threading.local):
    """The running traces of one thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[SliceTrace] = []


_traces = _Traces()


def make_mesh(topology: Topology) -> dtensor.Mesh:
    """Makes the DTensor mesh of a slice, the inner axes over its devices; the same for every slice.

    Args:
        topology: The whole mesh.
    """
    together = {axis: group for group in topology.merged for axis in group}
    groups = dict.fromkeys(together.get(name, (name,)) for name, _ in topology.inner_axes)
    return abstract_mesh({mesh_dim(g): math.prod(map(topology.axis_size, g)) for g in groups})


@contextlib.contextmanager
def tracing(mesh: dtensor.Mesh, topology: Topology, *, alltoall: bool) -> Iterator[SliceTrace]:
    """Makes `relayout_active` work on a mesh, in this thread, for the time of one trace.

    Args:
        mesh: The slice's mesh.
        topology: The whole mesh.
        alltoall: Whether re-layouts may use all-to-all.

    Yields:
        The trace.

    Raises:
        ValueError: If all-to-all is wanted and the environment switches it off.
    """
    switch = os.environ.get(ALLTOALL_SWITCH, "1")
    if alltoall and switch.lower() not in ("1", "true"):
        raise ValueError(
            "enable_alltoall=True needs DTensor's all-to-all, which the environment switches off: "
            f"unset {ALLTOALL_SWITCH} and start again. Received: {ALLTOALL_SWITCH}={switch!r}"
        )
    trace = SliceTrace(mesh, topology, alltoall)
    _traces.stack.append(trace)
    try:
        with laying_out(relayout_active), said_shapes.noting():
            yield trace
    finally:
        _traces.stack.pop()


@contextlib.contextmanager
def lowering(mesh: dtensor.Mesh) -> Iterator[None]:
    """Chooses how DTensor gathers in programs that are lowered within the block.

    Its own way, a sum of zero-padded parts, is right everywhere. The gather operation needs no
    padding, but DTensor fails on it on meshes of several axes.

    Args:
        mesh: The mesh of the program.
    """
    before = os.environ.pop(GATHER_SWITCH, None)
    # DTensor asks whether the variable is there; its value does not matter.
    if len(mesh.dim_names) == 1:
        os.environ[GATHER_SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(GATHER_SWITCH, None)
        if before is not None:
            os.environ[GATHER_SWITCH] = before


def active() -> SliceTrace | None:
    """The running trace of this thread, or None."""
    return _traces.stack[-1] if _traces.stack else None


def layout_for(
    mesh: dtensor.Mesh, dims: Dims, topology: Topology, what: str = "a tensor"
) -> dtensor.Layout:
    """The DTensor layout of a declared one.

    Args:
        mesh: A slice's mesh.
        dims: One entry a dim: None, an axis, or a tuple of axes. The data axis is left out: a
            slice never sees it.
        topology: The whole mesh.
        what: The tensor's name, for messages.

    Returns:
        A layout on `mesh`.

    Raises:
        ValueError: As `mesh_dim_for`.
    """
    return dtensor.Layout([mesh_dim_for(dim, topology, what) for dim in dims], mesh)


def mesh_dim_for(dim: Dim, topology: Topology, what: str = "a tensor") -> str:
    """The dim of the DTensor mesh of a slice that stands for an entry of a layout.

    Args:
        dim: None, an axis, or a tuple of axes. The data axis is left out.
        topology: The whole mesh.
        what: The tensor's name, for messages.

    Raises:
        ValueError: If the axes are not lowered as one, or are with others; see `merged_axes`.
    """
    axes = inner_axes_of(dim, topology)
    if not axes:
        return dtensor.UNSHARDED
    others = {axis for group in topology.merged for axis in group if group != axes}
    if others.isdisjoint(axes) and (len(axes) == 1 or axes in topology.merged):
        return mesh_dim(axes)
    raise ValueError(
        f"A dim of {what} is to be cut by {axes}. Axes that cut a dim together are lowered as one, "
        "which is decided when the weights are placed, by the layouts known then: those of "
        "weights, declared layers, activation patterns and `Relayout` layers; they have "
        f"{topology.merged or 'no axes together'}. Give one of those the same axes, or cut by "
        f"others here. Received: axes={axes} on a mesh of {topology.describe_axes()}"
    )


def relayout_active(
    tensor: Any, strategy: Sequence[Any], what: str = "a tensor", *, batch_dim: bool = True
) -> Any:
    """Lays a tensor out as declared if a program is being traced; else returns it as it is.

    Args:
        tensor: A tensor of any rank from that of the strategy on.
        strategy: One entry a dim: names or cut counts, see `kdist.sharding.strategy`. Dims beyond
            its end are not cut.
        what: The tensor's name, for notes.
        batch_dim: Whether dim 0 is the batch, as `parse_strategy` reads it.

    Returns:
        The tensor. A dim that does not divide (the rows of a last, smaller batch) is not cut in
        this trace, since DTensor has equal parts only; `SliceTrace.uncut` notes it.

    Raises:
        ValueError: If the strategy has more entries than the tensor dims, or does not parse.
        CannotLift: If the trace does not know the size of a dim that is to be cut.
    """
    trace = active()
    if trace is None:
        return tensor
    shape = tuple(tensor.shape)
    counted = any(isinstance(entry, int) for entry in strategy)
    padding = (1 if counted else None,) * (len(shape) - len(strategy))
    dims = parse_strategy(
        (*strategy, *padding), trace.topology, len(shape), operand=what, batch_dim=batch_dim
    )
    inner = inner_dims(dims, trace.topology)
    fitting = list(inner)
    for i, (dim, size) in enumerate(zip(inner, shape, strict=True)):
        count = cut_of(dim, trace.topology)
        if size is None:
            sizes.require_multiples(count, rows=i == 0)
        elif size % count:
            fitting[i] = None
            trace.uncut.append(uncut_dim(what, i, size, count, axes_of(dim)))
    trace.cut_over.update(a for dim in fitting for a in inner_axes_of(dim, trace.topology))
    layout = layout_for(trace.mesh, tuple(fitting), trace.topology, what)
    alltoall = trace.alltoall
    return changed(tensor, lambda value: relayout(value, layout, alltoall))


def relayout(tensor: Any, layout: dtensor.Layout, alltoall: bool) -> Any:
    """Changes a tensor's layout; differentiable.

    DTensor moves an axis from one dim to another with an all-to-all wherever it can. Without
    `alltoall` the tensor is therefore gathered first and then cut, in the backward pass too, and
    that also where the tensor happens to have the layout already: while tracing, nobody knows yet.

    Args:
        tensor: A tensor inside a program, or a DTensor.
        layout: The wanted layout.
        alltoall: Whether an all-to-all may be used. It moves 1/n of what gathering over n devices
            moves.

    Returns:
        The tensor in the new layout. Its gradient arrives in the layout of `tensor`.
    """
    if alltoall:
        return dtensor.relayout(tensor, layout)
    whole = dtensor.Layout.replicated(layout.mesh, layout.rank)

    def through_whole(value: Any) -> Any:
        gathered = dtensor.relayout(value, whole)
        return gathered if layout.is_fully_replicated() else dtensor.relayout(gathered, layout)

    if not tensor.dtype.is_floating and not tensor.dtype.is_complex:
        return through_whole(tensor)

    @tf.custom_gradient
    def moved(value: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return dtensor.relayout_like(dtensor.relayout(upstream, whole), value)

        return through_whole(value), gradient

    return moved(tensor)


def masked(change: Callable) -> Callable:
    """A change of a tensor after which it has the mask that it had: some calls attach their own."""

    @functools.wraps(change)
    def changed(tensor: Any, *args: Any) -> Any:
        made, mask = change(tensor, *args), keras_trainer.get_mask(tensor)
        if mask is not None:
            keras_trainer.set_mask(made, mask)
        return made

    return changed


def rows_only(tensor: Any) -> Any:
    """Makes every dim but the first whole, of the gradient too; what cuts the first stays."""
    if not _is_cuttable(tensor):
        return tensor
    if not tensor.dtype.is_floating:
        return _rows_only(tensor)
    return changed(tensor, tf.custom_gradient(lambda value: (_rows_only(value), _rows_only)))


def cut_along(tensor: Any, dim: int, over: Dim) -> Any:
    """Cuts one dim of a sum over an axis, all others but the first whole; see `ParallelConfig`."""
    trace = active()
    if trace is None:
        return tensor
    trace.along_sequence = True
    strategy = [over if n == dim else None for n in range(tensor.shape.rank)]

    def laid_out(value: Any) -> Any:
        return relayout_active(
            value, strategy, "tensors between cut layers (sequence_parallel=True)"
        )

    @tf.custom_gradient
    def pinned(value: Any) -> Any:
        # What adds gradients up would make its operands whole, since this takes all of the sum.
        return value, laid_out

    return changed(laid_out(tensor), pinned)


def gathered(tensor: Any) -> Any:
    """Makes every dim but the first whole; its gradient arrives in the layout of the tensor.

    Several that read one tensor gather it once: DTensor drops what is computed twice.
    """
    if active() is None:
        return tensor

    @tf.custom_gradient
    def whole(value: Any) -> Any:
        # Whole first: no all-to-all moves a cut from another dim.
        return _rows_only(value), lambda g: dtensor.relayout_like(_rows_only(g), value)

    return changed(tensor, whole)


def last_dim_cut(tensor: Any, dim: Dim) -> Any:
    """Cuts the last dim as `dim` says; what cuts the first stays, the others are whole."""
    trace = active()
    if trace is None or tensor.shape.rank < 2:
        return tensor
    last = mesh_dim_for(dim, trace.topology)
    specs = [dtensor.MATCH] + [dtensor.UNSHARDED] * (tensor.shape.rank - 2) + [last]
    return dtensor.relayout(tensor, dtensor.Layout(specs, trace.mesh))


def channels_cut(tensor: Any, dim: Dim) -> Any:
    """As `last_dim_cut`; of the gradient too."""
    if not _is_cuttable(tensor) or not tensor.dtype.is_floating:
        return tensor

    def laid_out(value: Any) -> Any:
        return last_dim_cut(value, dim)

    return changed(tensor, tf.custom_gradient(lambda value: (laid_out(value), laid_out)))


def _is_cuttable(tensor: Any) -> bool:
    return active() is not None and bool(getattr(getattr(tensor, "shape", None), "rank", None))


def _rows_only(tensor: Any) -> Any:
    trace = active()
    assert trace is not None
    specs = [dtensor.MATCH] + [dtensor.UNSHARDED] * (tensor.shape.rank - 1)
    return dtensor.relayout(tensor, dtensor.Layout(specs, trace.mesh))
