"""The entries of a layout: which mesh axes cut each dim of a tensor.

`Dims` has one entry a dim: None (not cut), the name of a mesh axis, or a tuple of names, the first
being the major one. `kdist.sharding.layout` builds layouts and layout maps out of these.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from kdist.sharding.axes import PIPE_NAME
from kdist.sharding.mesh import Topology

Dim = None | str | tuple[str, ...]
Dims = tuple[Dim, ...]
LEAVE_WHOLE = ", or leave it whole with ParallelConfig(indivisible='replicate')"
PACKED = (
    " (quantize('int4') packs a kernel of more dims into two, rows and columns: quantize before "
    "parallelize, and lay out these two or leave it out)"
)


def axes_of(dim: Dim) -> tuple[str, ...]:
    """The axes of one entry of a layout as a tuple, major first."""
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else dim


def cut_of(dim: Dim, topology: Topology) -> int:
    """Into how many parts one entry of a layout cuts its dim."""
    return math.prod(topology.axis_size(axis) for axis in axes_of(dim))


def inner_dims(dims: Dims, topology: Topology) -> Dims:
    """`dims` without the data axis."""
    return without_axis(dims, topology.data_axis, topology)


def without_axis(dims: Dims, axis: str | None, topology: Topology) -> Dims:
    """`dims` without one axis of the mesh, named as the mesh names it."""

    def kept(dim: Dim) -> Dim:
        return collapse(tuple(a for a in axes_of(dim) if topology.canonical(a) != axis))

    return tuple(kept(dim) for dim in dims)


def named_dims(value: Iterable[Any], topology: Topology, what: str) -> Dims:
    """Reads a layout of named axes and gives each axis the mesh's own name.

    Args:
        value: One entry a dim: None, an axis, or a tuple of axes.
        topology: The mesh.
        what: What the layout belongs to, for messages.

    Raises:
        ValueError: For another form, an axis that the mesh lacks, or one that stands twice.
    """
    clean = clean_dims(value, what)
    if PIPE_NAME in {axis for dim in clean for axis in axes_of(dim)} & set(topology.axis_names):
        raise ValueError(
            f"In {what}: the axis {PIPE_NAME!r} carries the stages of a pipeline and cuts no "
            "tensor. Give layers their stage with kdist.PipelineConfig(stages=...) or "
            f"kdist.set_stage, and cut tensors over other axes. Received: {value!r}"
        )
    try:
        return tuple(collapse(tuple(map(topology.canonical, axes_of(dim)))) for dim in clean)
    except ValueError as error:
        raise ValueError(f"In {what}: {error}") from error


def check_dims(
    dims: Dims,
    shape: Sequence[int | None],
    topology: Topology,
    what: str,
    *,
    skip_dim_0: bool = False,
    or_else: str = "",
    of_rank: str = "",
) -> None:
    """Checks that a layout fits a shape.

    Args:
        dims: The layout.
        shape: The tensor's shape; None for a dim of unknown size, which is not checked.
        topology: The mesh.
        what: What the layout belongs to, for messages.
        skip_dim_0: Leave dim 0 unchecked: a batch, whose size may change from step to step.
        or_else: Another fix than the usual ones, for messages.
        of_rank: The same where the rank differs.

    Raises:
        ValueError: If the rank differs, or a dim is no multiple of the sizes of its axes.
    """
    if len(dims) != len(shape):
        raise ValueError(
            f"The layout of {what} has {len(dims)} entries and the tensor {len(shape)} dims: give "
            f"one entry a dim, None where it is not cut{of_rank}. Received: layout={dims}, "
            f"shape={tuple(shape)}"
        )
    for index, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        cut = cut_of(dim, topology)
        if size is None or size % cut == 0 or (index == 0 and skip_dim_0):
            continue
        below, above = size - size % cut, size - size % cut + cut
        would = f"{above}" if below == 0 else f"{below} or {above}"
        names = " x ".join(f"{axis}={topology.axis_size(axis)}" for axis in axes_of(dim))
        raise ValueError(
            f"Dim {index} of {what} has {size} elements, which {names} cannot cut into {cut} "
            f"equal parts: make it a multiple of {cut} ({would} would work), or cut another "
            f"dim{or_else}. Received: layout={dims}, shape={tuple(shape)}"
        )


class WeightFit:
    """What becomes of the layout of a weight whose dims do not all divide.

    Args:
        topology: The mesh.
        replicate: Whether such a dim is left whole; else it is an error.

    Attributes:
        notes: A line for each dim that was left whole.

    Example:
    ```python
    fit = WeightFit(topology, replicate=True)
    fit(("model", None), (1, 8), "'key/kernel'")  # (None, None) on model=2
    ```
    """

    def __init__(self, topology: Topology, replicate: bool = False) -> None:
        self.topology = topology
        self.replicate = replicate
        self.notes: list[str] = []

    def __call__(self, dims: Dims, shape: Sequence[int], what: str) -> Dims:
        """The layout, without the cuts that do not fit the shape.

        Args:
            dims: The layout.
            shape: The weight's shape.
            what: The weight's name, for messages.

        Raises:
            ValueError: If the rank differs; the data axis cuts a dim before another axis does; or a
                dim does not divide and is not to be left whole.
        """
        self._check_order(dims, what)
        if not self.replicate or len(dims) != len(shape):
            packed = PACKED if len(dims) > len(shape) == 2 else ""
            check_dims(dims, shape, self.topology, what, or_else=LEAVE_WHOLE, of_rank=packed)
            return dims
        fitting = list(dims)
        for i, (dim, size) in enumerate(zip(dims, shape)):
            cut = cut_of(dim, self.topology)
            if size % cut:
                fitting[i] = None
                axes = " x ".join(f"{a}={self.topology.axis_size(a)}" for a in axes_of(dim))
                note = f"dim {i} of {what} is whole: its {size} elements do not divide by {axes}"
                if note not in self.notes:
                    self.notes.append(note)
        return tuple(fitting)

    def _check_order(self, dims: Dims, what: str) -> None:
        """Refuses what makes a part of no piece: the data axis slices what a device computes with.

        Raises:
            ValueError: The data axis stands before another one.
        """
        data = self.topology.data_axis
        for index, dim in enumerate(dims):
            axes = tuple(a for a in axes_of(dim) if self.topology.axis_size(a) > 1)
            if data in [self.topology.canonical(a) for a in axes[:-1]]:
                others = tuple(a for a in axes if self.topology.canonical(a) != data)
                raise ValueError(
                    f"Dim {index} of {what}: the data axis slices what each device of a replica "
                    f"has, so it stands last where axes cut a dim together: {(*others, data)}. "
                    f"Received: layout={dims}"
                )


def collapse(axes: tuple[str, ...]) -> Dim:
    """A group of axes as a layout entry."""
    return axes if len(axes) > 1 else (axes[0] if axes else None)


def clean_dims(value: Any, what: str) -> Dims:
    """Checks the form of a layout of named axes, for which no mesh is needed.

    Args:
        value: One entry a dim: None, an axis, or a tuple of axes.
        what: What the layout belongs to, for messages.

    Returns:
        The layout as tuples; `("model",)` as an entry becomes `"model"`, and `()` None.

    Raises:
        ValueError: For another form, or an axis that stands twice.
    """
    rule = f"In {what}: one entry a dim: None, an axis name, or a tuple of axis names"
    if not isinstance(value, tuple | list):
        raise ValueError(f"{rule}. Received: {value!r}")
    dims = []
    for entry in value:
        axes = tuple(entry) if isinstance(entry, tuple | list) else axes_of(entry)
        if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
            raise ValueError(f"{rule}. Received: entry={entry!r} of {value!r}")
        dims.append(collapse(axes))
    named = [axis for dim in dims for axis in axes_of(dim)]
    twice = sorted({axis for axis in named if named.count(axis) > 1})
    if twice:
        raise ValueError(
            f"An axis cuts one dim of a tensor at most; {twice[0]!r} stands more than once in "
            f"{what}. Received: {value!r}"
        )
    return tuple(dims)
