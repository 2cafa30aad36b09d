"""Fits the cost model to the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kdist.comm.collectives import group_of
from kdist.comm.cost import LinkCost, predict, terms
from kdist.comm.group import Group
from kdist.comm.measure import Measurement, check_positive, measure
from kdist.mesh import mesh as make_mesh

import keras
import numpy as np
import tensorflow as tf

ALGORITHMS = ("direct", "ring", "tree")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)


def calibrate(
    mesh: keras.distribution.DeviceMesh | Group | None = None,
    axis: str | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    iterations: int = 5,
) -> LinkCost:
    """Measures all-reduces and fits the start-up time and the time per byte.

    The constants are what a message costs *with* what the devices do between messages. Logical
    devices of one processor share its cores and its memory, so there the messages of a round are
    not free of each other and the error is larger than between machines; it is reported.

    Args:
        mesh: the mesh, or a group; by default up to 8 devices of this process. Across processes,
            every process calls this alike and gets constants of its own clock.
        axis: its axis; of a group or of a mesh with one axis, it may be left out.
        sizes: bytes of the values.
        iterations: timed runs of each; the median counts.

    Returns:
        The constants, with the median relative error of the prediction.

    Raises:
        ValueError: for a group of one device, an axis that the mesh does not have, fewer than two
            sizes, a size or a number of runs that is not an integer of at least 1.

    Example:
        >>> link = kdist.comm.calibrate()
        >>> kdist.comm.predict("all_gather", "ring", 1 << 20, 8, link)
    """
    group = _group(mesh, axis)
    for size in sizes:
        check_positive(sizes=size, iterations=iterations)
    # As `measure` rounds them: a float32 at least for each device.
    if group.size < 2 or len({-(-size // (4 * group.size)) for size in sizes}) < 2:
        raise ValueError(
            "Two constants need messages of two sizes, apart by more than 4 bytes per device, "
            "between two devices. Call kdist.init(cpu_devices=8) first, or give a mesh. "
            f"Received: devices={group.size}, sizes={tuple(sizes)}"
        )
    found = [
        measure("all_reduce", algorithm, size, group, iterations=iterations)
        for algorithm in ALGORITHMS
        for size in sizes
    ]
    return fit(found)


def fit(measurements: Sequence[Measurement]) -> LinkCost:
    """The constants with the smallest relative errors, in the least-squares sense.

    Args:
        measurements: of two sizes or more, or one constant remains open.

    Returns:
        The constants, neither below 0, with the median relative error.
    """
    rows = []
    for found in measurements:
        startups, share = terms(found.operation, found.algorithm, found.devices)
        rows.append((startups / found.seconds, share * found.nbytes / found.seconds))
    matrix, ones = np.array(rows), np.ones(len(rows))
    a, b = np.linalg.lstsq(matrix, ones, rcond=None)[0]
    if a < 0 or b < 0:  # then the other alone, if it must be
        alone = [float(column @ ones / (column @ column)) for column in matrix.T]
        a, b = (0.0, alone[1]) if a < 0 else (alone[0], 0.0)
    link = LinkCost(a=float(a), b=float(b))
    errors = [abs(error(found, link)) for found in measurements]
    return LinkCost(a=link.a, b=link.b, error=statistics.median(errors))


def error(found: Measurement, link: LinkCost) -> float:
    """By what part of the measured time the prediction is too long (or, below 0, too short)."""
    seconds = predict(found.operation, found.algorithm, found.nbytes, found.devices, link)
    return seconds / found.seconds - 1


def _group(mesh: keras.distribution.DeviceMesh | Group | None, axis: str | None) -> Group:
    if mesh is not None:
        if axis is None and not isinstance(mesh, Group) and len(mesh.axis_names) == 1:
            axis = mesh.axis_names[0]
        return group_of(mesh, axis)
    if axis is not None:
        raise ValueError(f"An axis is one of a mesh: give it too. Received: axis={axis!r}")
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return Group.of(make_mesh(data=min(8, len(tf.config.list_logical_devices(kind)))), "data")
