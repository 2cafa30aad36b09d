"""Which inner axes are lowered as one: those that cut a dim of some tensor together.

DTensor cuts a dim by one axis of its mesh. Two axes that always appear together, in one order, are
one axis of the product of their sizes to it. Pure: layouts in, groups of axes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdist.sharding.dims import Dim, Dims, axes_of, inner_dims
from kdist.sharding.mesh import Topology

Cut = tuple[str, Dims]
"""What a tensor is called, and its layout."""


def inner_axes_of(dim: Dim, topology: Topology) -> tuple[str, ...]:
    """The inner axes of an entry of a layout that cut, major first: not those of size 1."""
    (inner,) = inner_dims((dim,), topology)
    axes = tuple(map(topology.canonical, axes_of(inner)))
    return tuple(axis for axis in axes if topology.axis_size(axis) > 1)


def merged_axes(cuts: Sequence[Cut], topology: Topology) -> tuple[tuple[str, ...], ...]:
    """The groups of inner axes that cut a dim together, major axis first.

    Args:
        cuts: Every tensor whose layout is known, with its layout.
        topology: The mesh.

    Raises:
        ValueError: If another tensor uses an axis of a group alone, in another group, or the group
            in another order.
    """
    entries = [(cut, inner_axes_of(dim, topology)) for cut in cuts for dim in cut[1]]
    groups = {axes: cut for cut, axes in entries if len(axes) > 1}
    for group, (name, dims) in groups.items():
        apart = dict(cut for cut, axes in entries if set(axes) & set(group) and axes != group)
        if apart:
            raise ValueError(
                f"{_joined(group)} cut one dim of {name} together, so they are lowered as one axis "
                "(TensorFlow's DTensor cuts a dim by one), and no tensor can be cut by one of them "
                f"alone or in another order; {', '.join(apart)} would be. Cut these by {group}, or "
                f"not at all, or put the axes on different dims of {name}. "
                f"Received: {_shown([(name, dims), *apart.items()])}"
            )
    return tuple(groups)


def _joined(axes: Sequence[str]) -> str:
    return "The axes " + " and ".join(map(repr, axes))


def _shown(cuts: Sequence[Cut]) -> str:
    return ", ".join(f"{name}={dims}" for name, dims in cuts)
