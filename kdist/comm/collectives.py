"""The collectives: every device of a mesh gives a value, and gets one.

All take a list with one value per device *of this process*, in the mesh's order, and return such a
list. Devices that differ only along `axis` form a group; each group communicates by itself. Where
processes have joined by `kdist.comm.connect`, every process calls the same collectives in the same
order, each with its own values; where `kdist.init` made one program of them, process 0 calls, with
the values of all devices.

They run eagerly and inside `tf.function`, and gradient tapes see through them
(`kdist.comm.gradients`). Dtypes: float64, float32, float16, bfloat16, and integers of 8 to 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from kdist.comm.call import AUTO, Call
from kdist.comm.dispatch import collective
from kdist.comm.group import Group

import keras
import numpy as np
import tensorflow as tf

Mesh: TypeAlias = "keras.distribution.DeviceMesh | Group"
Results = list[Any]


def broadcast(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    root: int = 0,
    algorithm: str = AUTO,
) -> Results:
    """Gives every rank the value of the root.

    Args:
        values: Tensors, one per device; only the root's counts, others may be None (across
            processes a tensor or a `tf.TensorSpec` of the shape).
        mesh: A mesh, or a `Group`, which is checked once.
        axis: Name of a mesh axis; of a group, left out.
        root: Rank along the axis.
        algorithm: "direct", "ring", "tree", "halving", "hypercube", or "auto": direct in one
            process, across processes what the cost model finds cheapest.

    Returns:
        Tensors of the root's shape.

    Raises:
        ValueError: For values, an axis, a root or an algorithm that do not fit.
        PeerError: If another process does not answer in time.

    Example:
        >>> mesh = kdist.mesh(data=2)
        >>> [int(one) for one in kdist.comm.broadcast([tf.constant(7), None], mesh, "data")]
        [7, 7]
    """
    return run(values, mesh, axis, operation="broadcast", root=root, algorithm=algorithm)


def reduce(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    reduction: str = "sum",
    root: int = 0,
    algorithm: str = AUTO,
) -> Results:
    """Combines the values of all ranks on the root.

    Args:
        values: Tensors of one shape, one per device.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        reduction: "sum", "mean" (floats only; the sum divided by p), "max", "min" or "product".
        root: Rank along the axis.
        algorithm: As in `broadcast`.

    Returns:
        The result on the root, None elsewhere.

    Raises:
        ValueError: As `broadcast`, and for a mean of integers.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([1, 2]), tf.constant([3, 4])]
        >>> total, nothing = kdist.comm.reduce(values, kdist.mesh(data=2), "data", root=0)
        >>> total.numpy().tolist(), nothing
        ([4, 6], None)
    """
    return run(
        values, mesh, axis, operation="reduce", reduction=reduction, root=root, algorithm=algorithm
    )


def all_reduce(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    reduction: str = "sum",
    algorithm: str = AUTO,
) -> Results:
    """Combines the values of all ranks, on every rank.

    Args:
        values: Tensors of one shape, one per device.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        reduction: As in `reduce`.
        algorithm: As in `broadcast`; also "torus", whose rows are processes, or as near to a square
            as p allows in one, or "torus:AxB", B rows of A ranks; across processes also "runtime",
            TensorFlow's own all-reduce, which is what "auto" takes there for floats, int32 and
            int64.

    Returns:
        Tensors of that shape.

    Raises:
        ValueError: As `reduce`.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([2, 4, 6]), tf.constant([1, 2, 3]), tf.constant([4, 8, 12])]
        >>> sums = kdist.comm.all_reduce(values, kdist.mesh(data=3), "data", algorithm="ring")
        >>> [one.numpy().tolist() for one in sums]
        [[7, 14, 21], [7, 14, 21], [7, 14, 21]]
    """
    return run(values, mesh, axis, operation="all_reduce", reduction=reduction, algorithm=algorithm)


def gather(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    dim: int = 0,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = AUTO,
) -> Results:
    """Joins the values of all ranks on the root.

    Args:
        values: Tensors, one per device, of one shape but for `dim`.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        dim: The tensor dim along which they are joined, in the order of the ranks.
        root: Rank along the axis.
        sizes: Length of each rank's value along `dim`; needed across processes where they differ.
        algorithm: As in `broadcast`.

    Returns:
        The joined tensor on the root, None elsewhere.

    Raises:
        ValueError: As `broadcast`, and for a dim or sizes that do not fit the values.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([1, 2]), tf.constant([3])]
        >>> joined, nothing = kdist.comm.gather(values, kdist.mesh(data=2), "data", root=0)
        >>> joined.numpy().tolist(), nothing
        ([1, 2, 3], None)
    """
    return run(
        values,
        mesh,
        axis,
        operation="gather",
        dim=dim,
        root=root,
        sizes=sizes,
        algorithm=algorithm,
    )


def all_gather(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = AUTO,
) -> Results:
    """Joins the values of all ranks, on every rank.

    Args:
        values: As in `gather`.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        dim: As in `gather`.
        sizes: As in `gather`.
        algorithm: As in `broadcast`.

    Returns:
        The joined tensors.

    Raises:
        ValueError: As `gather`.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([1, 2]), tf.constant([3])]
        >>> joined = kdist.comm.all_gather(values, kdist.mesh(data=2), "data")
        >>> [one.numpy().tolist() for one in joined]
        [[1, 2, 3], [1, 2, 3]]
    """
    return run(
        values, mesh, axis, operation="all_gather", dim=dim, sizes=sizes, algorithm=algorithm
    )


def scatter(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    dim: int = 0,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = AUTO,
) -> Results:
    """Cuts the root's value and gives each rank its part.

    Args:
        values: As in `broadcast`.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        dim: The tensor dim that is cut.
        root: Rank along the axis.
        sizes: Length of each rank's part; by default as equal as possible, longer ones first.
        algorithm: As in `broadcast`.

    Returns:
        The parts.

    Raises:
        ValueError: As `gather`.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([1, 2, 3]), None]
        >>> parts = kdist.comm.scatter(values, kdist.mesh(data=2), "data", root=0)
        >>> [one.numpy().tolist() for one in parts]
        [[1, 2], [3]]
    """
    return run(
        values,
        mesh,
        axis,
        operation="scatter",
        dim=dim,
        root=root,
        sizes=sizes,
        algorithm=algorithm,
    )


def reduce_scatter(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    reduction: str = "sum",
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = AUTO,
) -> Results:
    """Combines the values of all ranks and gives each rank its part of the result.

    Args:
        values: Tensors of one shape, one per device.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        reduction: As in `reduce`.
        dim: The tensor dim that is cut.
        sizes: As in `scatter`.
        algorithm: As in `broadcast`.

    Returns:
        The parts.

    Raises:
        ValueError: As `reduce` and `gather`.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([1, 2]), tf.constant([3, 4])]
        >>> parts = kdist.comm.reduce_scatter(values, kdist.mesh(data=2), "data")
        >>> [one.numpy().tolist() for one in parts]
        [[4], [6]]
    """
    return run(
        values,
        mesh,
        axis,
        operation="reduce_scatter",
        reduction=reduction,
        dim=dim,
        sizes=sizes,
        algorithm=algorithm,
    )


def all_to_all(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None = None,
    *,
    cut_dim: int = 0,
    join_dim: int = 0,
    sizes: Sequence[Sequence[int]] | None = None,
    algorithm: str = AUTO,
) -> Results:
    """Cuts each value into a part per rank; each rank joins the parts that are for it.

    Args:
        values: Tensors, one per device, of one rank.
        mesh: As in `broadcast`.
        axis: As in `broadcast`.
        cut_dim: The tensor dim that is cut.
        join_dim: The tensor dim along which the parts are joined, in the order of the ranks.
        sizes: `sizes[s][d]` is the length along `cut_dim` of what rank s has for rank d; by
            default as equal as possible.
        algorithm: As in `broadcast`.

    Returns:
        The joined parts.

    Raises:
        ValueError: As `gather`.
        PeerError: As `broadcast`.

    Example:
        >>> values = [tf.constant([1, 2]), tf.constant([3, 4])]
        >>> parts = kdist.comm.all_to_all(values, kdist.mesh(data=2), "data")
        >>> [one.numpy().tolist() for one in parts]
        [[1, 3], [2, 4]]
    """
    return run(
        values,
        mesh,
        axis,
        operation="all_to_all",
        dim=cut_dim,
        join_dim=join_dim,
        sizes=sizes,
        algorithm=algorithm,
    )


def group_of(mesh: Mesh, axis: str | None) -> Group:
    """The group that a mesh and an axis, or a group alone, name."""
    if isinstance(mesh, Group):
        if axis not in (None, mesh.axis):
            raise ValueError(
                f"This group is along axis {mesh.axis!r}: leave `axis` out, or make another with "
                f"Group.of(mesh, {axis!r}). Received: axis={axis!r}"
            )
        return mesh
    if not isinstance(axis, str):
        raise ValueError(
            f"A collective over a mesh needs the name of an axis. Received: axis={axis!r}"
        )
    return Group.of(mesh, axis)


@tf.autograph.experimental.do_not_convert
def run(
    values: Sequence[Any],
    mesh: Mesh,
    axis: str | None,
    sizes: Sequence[Any] | None = None,
    **options: Any,
) -> Results:
    """Runs a collective; see the functions above for the arguments."""
    group = group_of(mesh, axis)
    return collective(Call(group=group, sizes=_as_tuple(sizes), **options), values)


def _as_tuple(value: Any) -> Any:
    """Lists as tuples and numpy's integers as Python's; the rest stays, for `Call` to refuse."""
    if isinstance(value, np.integer):
        return int(value)
    one = isinstance(value, str) or (tf.is_tensor(value) and value.shape.rank == 0)
    return tuple(map(_as_tuple, value)) if isinstance(value, Iterable) and not one else value
