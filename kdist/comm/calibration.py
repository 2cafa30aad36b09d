"""Fits the cost model to the machine at hand."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence

from kdist.comm.collectives import group_of
from kdist.comm.cost import LinkCost, predict, terms
from kdist.comm.group import Group
from kdist.comm.host import HostCost, HostWork, count, parts
from kdist.comm.measure import (
    DeviceProgram,
    Measurement,
    check_positive,
    measure,
    median_seconds,
)
from kdist.sharding.mesh import mesh as make_mesh

import keras
import numpy as np
import tensorflow as tf

ALGORITHMS = ("direct", "ring", "tree")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
HOST_SIZES = (1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 20, 1 << 21, 1 << 24)
"""Bytes of a device's part: the footprints of eight lie within caches, around them, and beyond."""
CACHES = tuple(1 << n for n in range(20, 26))
"""Bytes of caches that are tried; larger ones are found by the largest size alone, or not."""
SMALL = 1 << 10
REPEATED = 30


def calibrate(
    mesh: keras.distribution.DeviceMesh | Group | None = None,
    axis: str | None = None,
    *,
    sizes: Sequence[int] | None = None,
    iterations: int = 5,
) -> LinkCost:
    """Measures what the cost model needs to know of the machine.

    Across processes, and between GPUs, all-reduces are timed, for the start-up time and the time
    per byte of a message: a `LinkCost`. CPU devices of one process share its cores and memory and
    send nothing: there copies, additions and transfers are timed, and no collective, for a
    `HostCost`.

    Args:
        mesh: The mesh, or a group; by default up to 8 devices of this process. Across processes,
            every process calls this alike and gets constants of its own clock.
        axis: Its axis; of a group or of a mesh with one axis, it may be left out.
        sizes: Bytes of the values; in one process, of what a device copies or adds.
        iterations: Timed runs of each; the median counts.

    Returns:
        The constants, with the median relative error on what they were fitted to.

    Raises:
        ValueError: For a group of one device, an axis that the mesh does not have, fewer than two
            sizes, a size or a number of runs that is not an integer of at least 1.

    Example:
        >>> link = kdist.comm.calibrate()
        >>> kdist.comm.predict("all_gather", "ring", 1 << 20, 8, link)
    """
    group = _group(mesh, axis)
    in_process = not group.crosses_processes and all("CPU" in one for one in group.devices)
    sizes = sizes or (HOST_SIZES if in_process else SIZES)
    for size in sizes:
        check_positive(sizes=size, iterations=iterations)
    # As `measure` rounds them: a float32 at least for each device.
    if group.size < 2 or len({-(-size // (4 * group.size)) for size in sizes}) < 2:
        raise ValueError(
            "Two constants need messages of two sizes, apart by more than 4 bytes per device, "
            "between two devices. Call kdist.init(cpu_devices=8) first, or give a mesh. "
            f"Received: devices={group.size}, sizes={tuple(sizes)}"
        )
    if in_process:
        return fit_host(timed_work(group, sizes, iterations), group.size)
    found = [
        measure("all_reduce", algorithm, size, group, iterations=iterations)
        for algorithm in ALGORITHMS
        for size in sizes
    ]
    return fit(found)


def timed_work(
    group: Group, sizes: Sequence[int] = HOST_SIZES, iterations: int = 5
) -> list[tuple[HostWork, float]]:
    """Times small programs on the devices of a group: none of them is a collective.

    Args:
        group: CPU devices of this process.
        sizes: Bytes of what a device copies or adds.
        iterations: Timed runs; programs take turns, so that what else the machine does meanwhile
            meets all of them.

    Returns:
        What each program does, and its median time in seconds.
    """
    programs = list(_programs(group.devices, sizes))
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(iterations):
        for program, found in zip(programs, seconds):
            found.append(median_seconds(program, 1))
    return [(count(p.graph), statistics.median(s)) for p, s in zip(programs, seconds)]


def _programs(devices: Sequence[str], sizes: Sequence[int]) -> Iterator[DeviceProgram]:
    """Programs that differ in how much they do of each kind of work."""
    for rounds in (0, 2, 7):
        yield DeviceProgram(_ones(devices, SMALL, 1), functools.partial(_around, devices, rounds))
    for operations in (4, 16):
        yield _alike(devices, SMALL, 1, functools.partial(_added_up, times=operations))
    for size in sizes:
        yield _alike(devices, size // 8, 8, lambda values: tf.concat(values, 0))
        yield _alike(devices, size, 2, tf.add_n)


def _ones(devices: Sequence[str], nbytes: int, arrays: int) -> dict[str, list[np.ndarray]]:
    length = max(1, nbytes // 4)
    return {device: [np.ones(length, np.float32)] * arrays for device in devices}


def _alike(devices: Sequence[str], nbytes: int, arrays: int, compute: Callable) -> DeviceProgram:
    """Every device computes the same of arrays of its own."""

    def each(values: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        results = []
        for device, mine in zip(devices, values):
            with tf.device(device):
                results.append(compute(mine))
        return results

    return DeviceProgram(_ones(devices, nbytes, arrays), each)


def _around(devices: Sequence[str], rounds: int, values: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """Every device hands what it has to the next one, again and again."""
    held = [mine for (mine,) in values]
    for _ in range(rounds):
        arrived = []
        for rank, device in enumerate(devices):
            with tf.device(device):
                arrived.append(tf.identity(held[rank - 1]))
        held = arrived
    return held


def _added_up(values: list[tf.Tensor], times: int) -> tf.Tensor:
    total = values[0]
    for _ in range(times):
        total = tf.add_n([total, values[0]])
    return total


def fit_host(found: Sequence[tuple[HostWork, float]], devices: int) -> HostCost:
    """The constants of one process, fitted to what programs did and took.

    Args:
        found: See `timed_work`.
        devices: Number of devices.
    """

    def fitted(cache: int) -> tuple[HostCost, float]:
        rows = np.array([parts(done, cache) for done, _ in found])
        seconds = np.array([taken for _, taken in found])
        call, a, operation, b, cached = _constants(rows / seconds[:, None])
        link = HostCost(
            a=a, b=b, call=call, operation=operation, cached=cached, cache=cache, devices=devices
        )
        errors = [abs(link.of(done) / taken - 1) for done, taken in found]
        return dataclasses.replace(link, error=statistics.median(errors)), statistics.mean(errors)

    return min(map(fitted, CACHES), key=lambda one: one[1])[0]


def fit(measurements: Sequence[Measurement]) -> LinkCost:
    """The constants of a link, fitted to collectives.

    Args:
        measurements: Of two sizes or more, or one constant remains open.

    Returns:
        The constants, neither below 0, with the median relative error.
    """
    rows = []
    for found in measurements:
        startups, share = terms(found.operation, found.algorithm, found.devices)
        rows.append((startups / found.seconds, share * found.nbytes / found.seconds))
    a, b = _constants(np.array(rows))
    link = LinkCost(a=a, b=b)
    errors = [abs(error(found, link)) for found in measurements]
    return dataclasses.replace(link, error=statistics.median(errors))


def _constants(rows: np.ndarray) -> list[float]:
    """Constants, none below 0, whose sums over the columns are nearest to 1 in every row.

    Near in the sense of absolute differences, so that a disturbed measurement counts little: least
    squares, repeated with weights that make large differences linear.
    """
    weights = np.ones(len(rows))
    constants = np.zeros(rows.shape[1])
    for _ in range(REPEATED):
        constants = _not_negative(rows * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ constants - 1), 0.02))
    return [float(one) for one in constants]


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares; a constant that would be negative is 0, the most negative one first."""
    kept = list(range(matrix.shape[1]))
    while True:
        scale = np.abs(matrix[:, kept]).max(axis=0) + 1e-300
        found = np.linalg.lstsq(matrix[:, kept] / scale, target, rcond=None)[0] / scale
        if len(kept) == 1 or found.min() >= 0:
            constants = np.zeros(matrix.shape[1])
            constants[kept] = np.maximum(found, 0)
            return constants
        kept.pop(int(np.argmin(found * scale)))


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
